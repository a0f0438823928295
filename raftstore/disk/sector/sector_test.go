package sector

import (
	"bytes"
	"testing"
)

// A sector is valid for its file and offset only, and no flipped bit goes unnoticed.
func TestSectorStates(t *testing.T) {
	b := make([]byte, Size)
	if s, state := CheckStamp(b, 7, Size); state != Empty || s != (Stamp{}) {
		t.Errorf("zeros: %v, state %d", s, state)
	}
	copy(Content(b), "content")
	want := Stamp{Run: 3, Number: 9}
	Seal(b, 7, Size, want)
	if s, state := CheckStamp(b, 7, Size); state != Valid || s != want {
		t.Errorf("sealed: %v, state %d", s, state)
	}
	if _, state := CheckStamp(b, 8, Size); state != Damaged {
		t.Errorf("of another file: state %d", state)
	}
	if _, state := CheckStamp(b, 7, 2*Size); state != Damaged {
		t.Errorf("at another offset: state %d", state)
	}
	for at := range b {
		bad := bytes.Clone(b)
		bad[at] ^= 1 << (at % 8)
		if s, state := CheckStamp(bad, 7, Size); state != Damaged || s != (Stamp{}) {
			t.Errorf("byte %d flipped: %v, state %d", at, s, state)
		}
	}
}

// Content of any length comes back from the sectors of a buffer, which is used again.
func TestBuffer(t *testing.T) {
	var b Buffer
	for _, length := range []int{1, ContentSize - 1, ContentSize, ContentSize + 1, 20 * ContentSize, maxBuffer + 1, 5} {
		for name, seal := range map[string]struct {
			seal func(uint32, int64, Stamp) []byte
			step uint64
		}{"numbered": {b.SealNumbered, 1}, "uniform": {b.SealUniform, 0}} {
			b.Reset()
			want := bytes.Repeat([]byte{byte(length), 1}, length/2+1)[:length]
			b.Append(want[:length/3])
			b.Append(want[length/3:])
			out := seal.seal(7, Size, Stamp{Run: 1, Number: 5})
			if int64(len(out)) != CountFor(int64(length))*Size {
				t.Fatalf("%s: %d bytes of sectors for %d bytes", name, len(out), length)
			}
			var got []byte
			for at := 0; at < len(out); at += Size {
				number := 5 + seal.step*uint64(at/Size)
				if s, state := CheckStamp(out[at:], 7, Size+int64(at)); state != Valid ||
					s != (Stamp{Run: 1, Number: number}) {
					t.Fatalf("%s: sector %d of %d bytes: %v, state %d", name, at/Size, length, s, state)
				}
				got = append(got, Content(out[at:])...)
			}
			if !bytes.Equal(got[:length], want) || len(bytes.Trim(got[length:], "\x00")) > 0 {
				t.Errorf("%s: content of %d bytes differs", name, length)
			}
		}
	}
}
