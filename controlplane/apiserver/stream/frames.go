package stream

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/http"
)

// maxControlFrame limits the size of a SPDY control frame in bytes. Opening a stream needs only a
// few bytes. Headers are compressed, and decompression multiplies their size by at most a thousand.
const maxControlFrame = 2 << 10

// frameHead is the length of the header of each SPDY frame.
const frameHead = 8

// framed reads SPDY frames and fails at a control frame larger than maxControlFrame, before it is
// decompressed.
type framed struct {
	from io.Reader
	head [frameHead]byte
	have int    // bytes of head that have been read
	left uint32 // remaining bytes of the frame's payload
}

// Read reads frames. It returns an error after a control frame that is too large. It implements
// io.Reader.
func (f *framed) Read(p []byte) (int, error) {
	n, err := f.from.Read(p)
	if e := f.follow(p[:n]); e != nil {
		return 0, e
	}
	return n, err
}

// follow tracks the frame boundaries in data. It returns an error for a control frame that is too
// large.
func (f *framed) follow(data []byte) error {
	for len(data) > 0 {
		if f.left > 0 {
			n := min(int(f.left), len(data))
			f.left -= uint32(n)
			data = data[n:]
			continue
		}
		n := copy(f.head[f.have:], data)
		f.have += n
		data = data[n:]
		if f.have < frameHead {
			return nil
		}
		f.have, f.left = 0, binary.BigEndian.Uint32(f.head[4:])&0xffffff
		if control := f.head[0]&0x80 != 0; control && f.left > maxControlFrame {
			return fmt.Errorf("a control frame of %d bytes is refused: the most is %d", f.left, maxControlFrame)
		}
	}
	return nil
}

// framedConn is a SPDY connection with limited control frames.
type framedConn struct {
	net.Conn
	frames framed
}

func newFramedConn(c net.Conn) net.Conn { return &framedConn{c, framed{from: c}} }

// Read reads from the connection with limited control frames. It implements net.Conn.
func (c *framedConn) Read(p []byte) (int, error) { return c.frames.Read(p) }

// framedWriter is a ResponseWriter that limits the control frames of a hijacked connection.
type framedWriter struct{ http.ResponseWriter }

// Hijack takes over the connection. The returned reader limits control frames. It implements
// http.Hijacker.
func (w framedWriter) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, buffered, err := http.NewResponseController(w.ResponseWriter).Hijack()
	if err != nil {
		return nil, nil, fmt.Errorf("taking the connection over: %w", err)
	}
	return conn, bufio.NewReadWriter(bufio.NewReader(&framed{from: buffered.Reader}), buffered.Writer), nil
}
