// Package wire is the protocol between the agent and a pod's shim. It consists of frames with a
// length, a kind and a request ID, and of messages in a compact binary encoding.
//
// The shim must stay small, so this package imports only errors (encoding/binary alone would need
// reflection). Files are sent with a frame as SCM_RIGHTS; the message determines their number.
//
// A shim runs as long as its pod, so an agent connects to shims of earlier releases. Each
// connection starts with Hello and Welcome, which determine the version. Version 0 (before versions
// existed) writes fields one after the other. Version 1 writes each field with its number, as
// protocol buffers do. Therefore either side may add fields, and skips unknown fields. A request of
// an unknown kind gets an error as response; a response of an unknown kind is ignored. testdata has
// the bytes of every released version.
package wire

import "errors"

// Version is the highest protocol version of this release, which supports all lower versions too.
const Version int64 = 1

// Features that a side may announce in addition to the version, as bits. Unknown bits are ignored.
const (
	// FeatureKeepsEnds is the feature that the shim writes how a container exited to
	// Create.EndFile, followed by Create.EndNote. The file survives a power failure.
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
	KindForget                   // Target → Done: the container was removed, so forget it
	KindShutdown                 // → Done, and the shim exits
	KindDone                     // response: Done
	KindStarted                  // response: Started
	KindSnapshot                 // response of version 0: Snapshot
	KindExited                   // response to Exec, or with ID 0 the message that a container or pause exited
	KindWelcome                  // response: Welcome
)

// MaxFrame is the maximum size of a frame with its header, in bytes.
const MaxFrame = 1 << 20

const headerLen = 9

// ErrMalformed is returned for bytes that are not a valid frame or message.
var ErrMalformed = errors.New("shim protocol: malformed frame")

// ErrTooLong is returned for a frame with a length field above MaxFrame.
var ErrTooLong = errors.New("shim protocol: frame too long")

// Frame is one message on the socket, with its kind and request ID.
type Frame struct {
	Kind Kind
	ID   uint32
	Body []byte
}

// AppendFrame appends the encoded frame to dst and returns the extended slice.
func AppendFrame(dst []byte, frame Frame) []byte {
	dst = appendUint32(dst, uint32(headerLen+len(frame.Body)))
	dst = append(dst, byte(frame.Kind))
	dst = appendUint32(dst, frame.ID)
	return append(dst, frame.Body...)
}

// NextFrame decodes the first frame in buf. count is the frame's length in bytes, or 0 if buf
// contains only a part of the frame. The frame's Body is a slice of buf.
func NextFrame(buf []byte) (frame Frame, count int, err error) {
	if len(buf) < 4 {
		return Frame{}, 0, nil
	}
	size := decodeUint32(buf)
	if size > MaxFrame {
		return Frame{}, 0, ErrTooLong
	}
	if size < headerLen {
		return Frame{}, 0, ErrMalformed
	}
	if uint32(len(buf)) < size {
		return Frame{}, 0, nil
	}
	frame.Kind = Kind(buf[4])
	if frame.Kind == 0 {
		return Frame{}, 0, ErrMalformed
	}
	frame.ID = decodeUint32(buf[5:])
	frame.Body = buf[headerLen:size]
	return frame, int(size), nil
}
