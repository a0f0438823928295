package stream

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/http"
)

// maxControlFrame is the maximum size of a SPDY control frame in bytes. Opening a stream needs only
// a few bytes. Headers are compressed, and decompression can multiply their size by up to a
// thousand.
const maxControlFrame = 2 << 10

// frameHead is the length in bytes of the header of each SPDY frame.
const frameHead = 8

// frameReader is an io.Reader of SPDY frames that fails at a control frame larger than
// maxControlFrame, before the frame is decompressed.
type frameReader struct {
	source    io.Reader
	head      [frameHead]byte
	headBytes int    // bytes of head that have been read
	remaining uint32 // remaining bytes of the frame's payload
}

// Read reads bytes of SPDY frames. It returns an error at a control frame that is too large. It
// implements io.Reader.
func (f *frameReader) Read(p []byte) (int, error) {
	n, err := f.source.Read(p)
	if e := f.trackFrames(p[:n]); e != nil {
		return 0, e
	}
	return n, err
}

// trackFrames finds the boundaries of frames in data. It returns an error at a control frame that
// is too large.
func (f *frameReader) trackFrames(data []byte) error {
	for len(data) > 0 {
		if f.remaining > 0 {
			n := min(int(f.remaining), len(data))
			f.remaining -= uint32(n)
			data = data[n:]
			continue
		}
		n := copy(f.head[f.headBytes:], data)
		f.headBytes += n
		data = data[n:]
		if f.headBytes < frameHead {
			return nil
		}
		f.headBytes, f.remaining = 0, binary.BigEndian.Uint32(f.head[4:])&0xffffff
		if control := f.head[0]&0x80 != 0; control && f.remaining > maxControlFrame {
			return fmt.Errorf("a control frame has %d bytes, the maximum is %d", f.remaining, maxControlFrame)
		}
	}
	return nil
}

// framedConn is a SPDY connection that limits the size of received control frames.
type framedConn struct {
	net.Conn
	frames frameReader
}

func newFramedConn(c net.Conn) net.Conn { return &framedConn{c, frameReader{source: c}} }

// Read reads from the connection. It fails at a control frame that is too large. It implements
// net.Conn.
func (c *framedConn) Read(p []byte) (int, error) { return c.frames.Read(p) }

// framedWriter is an http.ResponseWriter that limits the size of control frames on its hijacked
// connection.
type framedWriter struct{ http.ResponseWriter }

// Hijack takes over the connection. The returned connection and reader limit the size of control
// frames. It implements http.Hijacker.
func (w framedWriter) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, buffered, err := http.NewResponseController(w.ResponseWriter).Hijack()
	if err != nil {
		return nil, nil, fmt.Errorf("hijacking the connection: %w", err)
	}
	return conn, bufio.NewReadWriter(bufio.NewReader(&frameReader{source: buffered.Reader}), buffered.Writer), nil
}
