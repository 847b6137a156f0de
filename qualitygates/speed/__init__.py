"""Speed gate: interleaved timings of both arms, the rules that judge them, their report section."""
