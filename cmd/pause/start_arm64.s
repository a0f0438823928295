#include "textflag.h"

// Entry of the process: sigaction(SIGCHLD, SIG_IGN), then ppoll of nothing for ever.
TEXT ·start(SB), NOSPLIT|NOFRAME, $0
	SUB  $64, RSP
	MOVD $1, R4
	MOVD R4, 0(RSP)   // SIG_IGN
	MOVD ZR, 8(RSP)   // flags
	MOVD ZR, 16(RSP)  // mask
	MOVD ZR, 24(RSP)
	MOVD $17, R0      // SIGCHLD
	MOVD RSP, R1
	MOVD ZR, R2
	MOVD $8, R3
	MOVD $134, R8     // rt_sigaction
	SVC

forever:
	MOVD ZR, R0
	MOVD ZR, R1
	MOVD ZR, R2
	MOVD ZR, R3
	MOVD ZR, R4
	MOVD $73, R8 // ppoll
	SVC
	B    forever
