// Package wire is the protocol between the agent and a pod's shim: frames with a
// length, a kind and a request id, and messages in a flat binary form.
//
// The shim lives as long as its pod and must stay small, so this package needs
// nothing but the errors package (encoding/binary alone would bring reflection). Files travel
// beside a frame as SCM_RIGHTS; a message says how many it takes.
//
// Shims live as long as their pods, so an agent meets those of earlier releases. Each connection begins with Hello
// and Welcome, which settle the version: version 0 (before there were versions) writes fields one after the other,
// version 1 writes each with its number, as protocol buffers do, so that either side may add fields and skips those
// it does not know. A request of an unknown kind is answered with an error, an answer of an unknown kind ignored.
// The bytes of every released version are kept in testdata.
package wire

import "errors"

// Version is the highest version of this release. It speaks all lower ones too.
const Version int64 = 1

// What one side can do beyond its version. An unknown bit means nothing.
const (
	// FeatureKeepsEnds: the shim writes how a container ended to Create.EndFile, with Create.EndNote, so that it
	// outlives a power cut.
	FeatureKeepsEnds uint64 = 1 << iota
)

// Features is what this release can do.
const Features = FeatureKeepsEnds

// Kind says what a frame carries.
type Kind byte

// The kinds of frames. The agent asks with those up to KindShutdown. An answer
// carries the id of its request.
const (
	KindHello    Kind = 1 + iota // Hello → Welcome, or with an empty body → Snapshot, in version 0
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
	KindSnapshot                 // answer of version 0: Snapshot
	KindExited                   // answer to Exec, or (id 0) a note that a container or pause ended
	KindWelcome                  // answer: Welcome
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
	if f.Kind == 0 {
		return Frame{}, 0, ErrMalformed
	}
	f.ID = u32(buf[5:])
	f.Body = buf[headerLen:size]
	return f, int(size), nil
}
