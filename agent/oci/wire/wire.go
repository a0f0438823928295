// Package wire is the protocol between the agent and a pod's shim: frames with a
// length, a kind and a request id, and messages in a flat binary form.
//
// The shim lives as long as its pod and must stay small, so this package needs
// nothing but the errors package (encoding/binary alone would bring reflection). Files travel
// beside a frame as SCM_RIGHTS; a message says how many it takes.
package wire

import "errors"

// Kind says what a frame carries.
type Kind byte

// The kinds of frames. The agent asks with all but the last three. An answer
// carries the id of its request.
const (
	KindHello    Kind = 1 + iota // → Snapshot
	KindPause                    // Pause → Started
	KindCreate                   // Create → Started
	KindStart                    // Start → Done
	KindSignal                   // Signal → Done
	KindExec                     // Exec with files → Started, then Exited
	KindAttach                   // Attach with files → Done
	KindResize                   // Resize → Done
	KindReopen                   // Target → Done: close and open the log again
	KindForget                   // Target → Done: the container was removed
	KindShutdown                 // → Done, and the shim ends
	KindDone                     // answer: Done
	KindStarted                  // answer: Started
	KindSnapshot                 // answer: Snapshot
	KindExited                   // answer to Exec, or (id 0) a note that a container or pause ended
)

// MaxFrame bounds a frame, header included.
const MaxFrame = 1 << 20

const headerLen = 9

// ErrMalformed says that bytes are no frame or message of this protocol.
var ErrMalformed = errors.New("shim protocol: malformed frame")

// ErrTooLong says that a frame announces more than MaxFrame bytes.
var ErrTooLong = errors.New("shim protocol: frame too long")

// Frame is one unit on the socket.
type Frame struct {
	Kind Kind
	ID   uint32
	Body []byte
}

// AppendFrame appends f in wire form.
func AppendFrame(dst []byte, f Frame) []byte {
	dst = appendU32(dst, uint32(headerLen+len(f.Body)))
	dst = append(dst, byte(f.Kind))
	dst = appendU32(dst, f.ID)
	return append(dst, f.Body...)
}

// NextFrame splits the first frame off buf. n is the number of bytes it took, 0
// when buf holds only a part of it. Body points into buf.
func NextFrame(buf []byte) (f Frame, n int, err error) {
	if len(buf) < 4 {
		return Frame{}, 0, nil
	}
	size := u32(buf)
	if size > MaxFrame {
		return Frame{}, 0, ErrTooLong
	}
	if size < headerLen {
		return Frame{}, 0, ErrMalformed
	}
	if uint32(len(buf)) < size {
		return Frame{}, 0, nil
	}
	f.Kind = Kind(buf[4])
	if f.Kind < KindHello || f.Kind > KindExited {
		return Frame{}, 0, ErrMalformed
	}
	f.ID = u32(buf[5:])
	f.Body = buf[headerLen:size]
	return f, int(size), nil
}

// enc appends fields; dec takes them off in the same order.
type enc struct{ b []byte }

// num writes a zigzag varint.
func (e *enc) num(v int64) { e.b = appendUvarint(e.b, uint64(v)<<1^uint64(v>>63)) }
func (e *enc) str(s string) {
	e.b = appendUvarint(e.b, uint64(len(s)))
	e.b = append(e.b, s...)
}
func (e *enc) flag(v bool) {
	if v {
		e.num(1)
	} else {
		e.num(0)
	}
}
func (e *enc) strs(v []string) {
	e.num(int64(len(v)))
	for _, s := range v {
		e.str(s)
	}
}

type dec struct {
	b   []byte
	bad bool
}

func (d *dec) uvarint() uint64 {
	var v uint64
	for i, c := range d.b {
		if i == 9 && c > 1 {
			break // more than 64 bits
		}
		v |= uint64(c&0x7f) << (7 * i)
		if c < 0x80 {
			d.b = d.b[i+1:]
			return v
		}
	}
	d.bad, d.b = true, nil
	return 0
}

func (d *dec) num() int64 {
	v := d.uvarint()
	return int64(v>>1) ^ -int64(v&1)
}

func (d *dec) str() string {
	n := d.uvarint()
	if n > uint64(len(d.b)) {
		d.bad, d.b = true, nil
		return ""
	}
	s := string(d.b[:n])
	d.b = d.b[n:]
	return s
}

func (d *dec) flag() bool {
	v := d.num()
	if v != 0 && v != 1 {
		d.bad = true
	}
	return v == 1
}

func (d *dec) strs() []string {
	n := d.num()
	// Each string takes a byte at least: a count beyond the rest is a lie.
	if n < 0 || n > int64(len(d.b)) {
		d.bad, d.b = true, nil
		return nil
	}
	if n == 0 {
		return nil
	}
	v := make([]string, n)
	for i := range v {
		v[i] = d.str()
	}
	return v
}

func (d *dec) end() error {
	if d.bad || len(d.b) != 0 {
		return ErrMalformed
	}
	return nil
}

func appendUvarint(b []byte, v uint64) []byte {
	for v >= 0x80 {
		b = append(b, byte(v)|0x80)
		v >>= 7
	}
	return append(b, byte(v))
}

func appendU32(b []byte, v uint32) []byte {
	return append(b, byte(v), byte(v>>8), byte(v>>16), byte(v>>24))
}

func u32(b []byte) uint32 {
	return uint32(b[0]) | uint32(b[1])<<8 | uint32(b[2])<<16 | uint32(b[3])<<24
}
