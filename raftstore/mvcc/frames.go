package mvcc

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	storev1 "keelson.dev/keelson/proto/store/v1"
)

// A snapshot is a sequence of frames: four bytes of length and four bytes of CRC-32C, both
// little-endian, then the payload. Each checksum continues from the previous one. A missing,
// repeated or misplaced frame is therefore detected like a flipped bit.

const (
	maxFrame   = 16 << 20
	frameChunk = 256 << 10 // payload size at which a chunk is written
)

// ErrCorrupt is returned for a snapshot that is damaged, or for data that is not a snapshot.
var ErrCorrupt = errors.New("mvcc: snapshot is corrupt")

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

type frameWriter struct {
	w    *bufio.Writer
	sum  uint32
	buf  []byte
	head [8]byte
}

func newFrameWriter(w io.Writer) *frameWriter {
	return &frameWriter{w: bufio.NewWriterSize(w, 64<<10)}
}

func (fw *frameWriter) writeMessage(f *storev1.SnapshotFrame) error {
	var err error
	if fw.buf, err = (proto.MarshalOptions{}).MarshalAppend(fw.buf[:0], f); err != nil {
		return fmt.Errorf("encoding snapshot frame: %w", err)
	}
	return fw.writeFrame(fw.buf, nil)
}

// writeChunk writes a frame that contains a SnapshotFrame message with only one field. chunk is the
// encoded value of that field.
func (fw *frameWriter) writeChunk(field protowire.Number, chunk []byte) error {
	fw.buf = appendLength(fw.buf[:0], field, len(chunk))
	return fw.writeFrame(fw.buf, chunk)
}

// writeFrame writes one frame: the header, followed by the frame's payload, which is payload and
// rest together.
func (fw *frameWriter) writeFrame(payload, rest []byte) error {
	n := len(payload) + len(rest)
	if n > maxFrame {
		return fmt.Errorf("encoding snapshot frame: %d bytes, at most %d", n, maxFrame)
	}
	fw.sum = crc32.Update(crc32.Update(fw.sum, castagnoli, payload), castagnoli, rest)
	binary.LittleEndian.PutUint32(fw.head[:4], uint32(n))
	binary.LittleEndian.PutUint32(fw.head[4:], fw.sum)
	for _, part := range [...][]byte{fw.head[:], payload, rest} {
		if _, err := fw.w.Write(part); err != nil {
			return err
		}
	}
	return nil
}

func (fw *frameWriter) flush() error { return fw.w.Flush() }

type frameReader struct {
	r   *bufio.Reader
	sum uint32
	n   int
	buf []byte
}

func newFrameReader(r io.Reader) *frameReader {
	return &frameReader{r: bufio.NewReaderSize(r, 64<<10)}
}

// readFrame returns the next frame. The end of the stream is an error: the trailer marks the end of
// a snapshot.
func (fr *frameReader) readFrame() (*storev1.SnapshotFrame, error) {
	fr.n++
	var head [8]byte
	if _, err := io.ReadFull(fr.r, head[:]); err != nil {
		return nil, fr.corruptError("head: %v", err)
	}
	n := binary.LittleEndian.Uint32(head[:4])
	if n > maxFrame {
		return nil, fr.corruptError("length %d", n)
	}
	// The buffer grows while reading, so that a wrong length does not allocate memory.
	fr.buf = fr.buf[:0]
	for uint32(len(fr.buf)) < n {
		step := min(int(n)-len(fr.buf), 1<<20)
		at := len(fr.buf)
		fr.buf = append(fr.buf, make([]byte, step)...)
		if _, err := io.ReadFull(fr.r, fr.buf[at:]); err != nil {
			return nil, fr.corruptError("payload: %v", err)
		}
	}
	fr.sum = crc32.Update(fr.sum, castagnoli, fr.buf)
	if fr.sum != binary.LittleEndian.Uint32(head[4:]) {
		return nil, fr.corruptError("checksum does not match")
	}
	f := new(storev1.SnapshotFrame)
	if err := proto.Unmarshal(fr.buf, f); err != nil {
		return nil, fr.corruptError("payload: %v", err)
	}
	return f, nil
}

func (fr *frameReader) corruptError(format string, args ...any) error {
	return fmt.Errorf("%w: frame %d: %s", ErrCorrupt, fr.n, fmt.Sprintf(format, args...))
}
