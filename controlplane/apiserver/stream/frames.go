package stream

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/http"
)

// maxControlFrame bounds a frame of SPDY that is no data. A stream is opened with a few words, and headers are
// compressed: a thousand times of this is unpacked at most.
const maxControlFrame = 2 << 10

// frameHead is the length of what every frame of SPDY begins with.
const frameHead = 8

// framed reads frames of SPDY and refuses control frames that are too large, before they are unpacked.
type framed struct {
	from io.Reader
	head [frameHead]byte
	have int    // of head
	left uint32 // of the frame's payload
}

// Read is io.Reader.
func (f *framed) Read(p []byte) (int, error) {
	n, err := f.from.Read(p)
	if e := f.follow(p[:n]); e != nil {
		return 0, e
	}
	return n, err
}

// follow keeps track of where frames begin.
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

// framedConn is a connection on which a client speaks SPDY.
type framedConn struct {
	net.Conn
	frames framed
}

func newFramedConn(c net.Conn) net.Conn { return &framedConn{c, framed{from: c}} }

// Read is net.Conn.
func (c *framedConn) Read(p []byte) (int, error) { return c.frames.Read(p) }

// framedWriter hands out a connection on which frames are followed.
type framedWriter struct{ http.ResponseWriter }

// Hijack is http.Hijacker.
func (w framedWriter) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, buffered, err := http.NewResponseController(w.ResponseWriter).Hijack()
	if err != nil {
		return nil, nil, fmt.Errorf("taking the connection over: %w", err)
	}
	return conn, bufio.NewReadWriter(bufio.NewReader(&framed{from: buffered.Reader}), buffered.Writer), nil
}
