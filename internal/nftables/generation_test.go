package nftables

import (
	"encoding/binary"
	"testing"

	"golang.org/x/sys/unix"
)

// kernelResponse returns a message of the kernel with the given attributes, each a number and a
// value of 4 bytes.
func kernelResponse(kind uint16, attrs ...uint32) []byte {
	out := make([]byte, headerSize+genmsgSize)
	for i := 0; i+1 < len(attrs); i += 2 {
		out = binary.NativeEndian.AppendUint16(out, 8)
		out = binary.NativeEndian.AppendUint16(out, uint16(attrs[i]))
		out = binary.BigEndian.AppendUint32(out, attrs[i+1])
	}
	binary.NativeEndian.PutUint32(out, uint32(len(out)))
	binary.NativeEndian.PutUint16(out[4:], kind)
	return out
}

// The generation is found among other attributes. A response without it is an error.
func TestParseGeneration(t *testing.T) {
	const gen = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_NEWGEN
	if got, err := parseGeneration(kernelResponse(gen, 2, 99, unix.NFTA_GEN_ID, 17, 3, 5)); err != nil || got != 17 {
		t.Errorf("generation %d, %v; want 17", got, err)
	}
	refused := make([]byte, headerSize+genmsgSize)
	binary.NativeEndian.PutUint16(refused[4:], unix.NLMSG_ERROR)
	binary.NativeEndian.PutUint32(refused[headerSize:], ^uint32(unix.EPERM)+1)
	for name, raw := range map[string][]byte{"empty": nil, "no attribute": kernelResponse(gen),
		"another attribute": kernelResponse(gen, 2, 9),
		"cut attribute":     kernelResponse(gen, unix.NFTA_GEN_ID, 7)[:headerSize+genmsgSize+6], "error": refused} {
		if got, err := parseGeneration(raw); err == nil {
			t.Errorf("%s: generation %d without an error", name, got)
		}
	}
}

// The kernel returns a generation.
func TestGeneration(t *testing.T) {
	first, err := Generation()
	if err != nil {
		t.Fatal(err)
	}
	if first == 0 {
		t.Error("generation 0: the kernel starts at 1")
	}
}
