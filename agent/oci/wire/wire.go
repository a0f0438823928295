// Package wire is the protocol between the agent and a pod's shim. It consists of frames with a
// length, a kind and a request ID, and of messages in a flat binary form.
//
// The shim must stay small, so this package imports only errors (encoding/binary alone would need
// reflection). Files are sent with a frame as SCM_RIGHTS; the message determines their number.
//
// A shim lives as long as its pod, so an agent meets shims of earlier releases. Each connection
// starts with Hello and Welcome, which determine the version. Version 0 (before versions existed)
// writes fields one after the other. Version 1 writes each field with its number, as protocol
// buffers do. So either side may add fields and skips unknown ones. A request of an unknown kind
// gets an error as response; a response of an unknown kind is ignored. testdata has the bytes of
// every released version.
package wire

import "errors"

// Version is the highest protocol version of this release. It supports all lower versions too.
const Version int64 = 1

// Features beyond the version, as bits. Unknown bits are ignored.
const (
	// FeatureKeepsEnds: the shim writes how a container ended to Create.EndFile, followed by
	// Create.EndNote. The file survives a power failure.
	FeatureKeepsEnds uint64 = 1 << iota
)

// Features are the features of this release.
const Features = FeatureKeepsEnds

// Kind is the type of a frame's body.
type Kind byte

// The kinds of frames. Kinds up to KindShutdown are requests of the agent. A response has the ID of
// its request.
const (
	KindHello    Kind = 1 + iota // Hello → Welcome, or with an empty body → Snapshot, in version 0
	KindPause                    // Pause → Started
	KindCreate                   // Create → Started
	KindStart                    // Start → Done
	KindSignal                   // Signal → Done
	KindExec                     // Exec with files → Started, then Exited
	KindAttach                   // Attach with files → Done
	KindResize                   // Resize → Done
	KindReopen                   // Target → Done: close and reopen the log
	KindForget                   // Target → Done: the container was removed
	KindShutdown                 // → Done, and the shim exits
	KindDone                     // response: Done
	KindStarted                  // response: Started
	KindSnapshot                 // response of version 0: Snapshot
	KindExited                   // response to Exec, or (ID 0) a message that a container or pause ended
	KindWelcome                  // response: Welcome
)

// MaxFrame bounds a frame, header included.
const MaxFrame = 1 << 20

const headerLen = 9

// ErrMalformed is returned for bytes that are not a valid frame or message.
var ErrMalformed = errors.New("shim protocol: malformed frame")

// ErrTooLong is returned for a frame with a length field above MaxFrame.
var ErrTooLong = errors.New("shim protocol: frame too long")

// Frame is one unit of the protocol on the socket.
type Frame struct {
	Kind Kind
	ID   uint32
	Body []byte
}

// AppendFrame appends the encoded frame f to dst.
func AppendFrame(dst []byte, f Frame) []byte {
	dst = appendU32(dst, uint32(headerLen+len(f.Body)))
	dst = append(dst, byte(f.Kind))
	dst = appendU32(dst, f.ID)
	return append(dst, f.Body...)
}

// NextFrame decodes the first frame in buf. n is the number of its bytes, or 0 if buf contains only
// a part of it. The frame's Body is a slice of buf.
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
