package disk

import (
	"crypto/cipher"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"hash/crc32"
	"io"
)

// Snapshots and backups are files of the same make:
//
//	magic 8 │ format 4 │ length 4 │ header, JSON │ checksum 4
//	frames: length 4, highest bit = the last │ content │ checksum 4, unless sealed
//	end: size of the content 8 │ checksum 4
//	backups: SHA-256 of all of it
//
// Each checksum goes on from the one before. Sealed, a frame is a message of
// AES-256-GCM, its number the nonce, under a key that is made for this file and
// this header. So a frame that is missing, repeated or out of place is noticed
// as surely as a flipped bit, and the end cannot be cut off.
const (
	containerFormat = 1
	frameBytes      = 128 << 10
	maxFrameBytes   = 1 << 20
	maxHeaderBytes  = 1 << 20
	lastFrame       = 1 << 31
	gcmTag          = 16
	footerBytes     = 12
)

// encodeHeader makes the head of a file.
func encodeHeader(magic string, header []byte) []byte {
	b := append([]byte(magic), 0, 0, 0, 0, 0, 0, 0, 0)
	binary.LittleEndian.PutUint32(b[8:], containerFormat)
	binary.LittleEndian.PutUint32(b[12:], uint32(len(header)))
	b = append(b, header...)
	return binary.LittleEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
}

// errFormat says that a file is of another make or version.
type formatError struct{ found string }

func (e *formatError) Error() string { return e.found }

// readHeader reads the head of a file. It returns the JSON and all its bytes.
func readHeader(r io.Reader, magic string) (header, all []byte, err error) {
	var head [16]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, nil, endsEarly(err)
	}
	if string(head[:8]) != magic {
		return nil, nil, &formatError{fmt.Sprintf("it begins with %q, not with %q", head[:8], magic)}
	}
	if f := binary.LittleEndian.Uint32(head[8:]); f != containerFormat {
		return nil, nil, &formatError{fmt.Sprintf("it has format %d, this version reads format %d", f, containerFormat)}
	}
	n := binary.LittleEndian.Uint32(head[12:])
	if n > maxHeaderBytes {
		return nil, nil, fmt.Errorf("header of %d bytes", n)
	}
	all = append(head[:], make([]byte, n+4)...)
	if _, err := io.ReadFull(r, all[16:]); err != nil {
		return nil, nil, endsEarly(err)
	}
	if crc32.Checksum(all[:16+n], castagnoli) != binary.LittleEndian.Uint32(all[16+n:]) {
		return nil, nil, errors.New("checksum of the header does not match")
	}
	return all[16 : 16+n], all, nil
}

func endsEarly(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return errors.New("it ends too soon")
	}
	return err
}

// fileKey makes the key for one file. secret is of a data key, or of the file alone.
func fileKey(secret, salt, head []byte, purpose string) cipher.AEAD {
	sum := sha256.Sum256(head)
	return newAEAD(derive(secret, salt, purpose+string(sum[:])))
}

func frameNonce(number uint64, last bool) []byte {
	b := make([]byte, 4, 12)
	if last {
		b[0] = 1
	}
	return binary.LittleEndian.AppendUint64(b, number)
}

// frameWriter cuts content into frames.
type frameWriter struct {
	w      io.Writer
	aead   cipher.AEAD // nil = in clear
	chain  uint32
	number uint64
	size   int64
	buf    []byte // length, content
	err    error
}

// newFrameWriter begins a file: head is written.
func newFrameWriter(w io.Writer, head []byte, aead cipher.AEAD) (*frameWriter, error) {
	fw := &frameWriter{w: w, aead: aead, chain: crc32.Checksum(head, castagnoli), buf: make([]byte, 4, 4+frameBytes+gcmTag)}
	_, fw.err = w.Write(head)
	return fw, fw.err
}

// Write implements io.Writer.
func (fw *frameWriter) Write(p []byte) (int, error) {
	n := len(p)
	for len(p) > 0 && fw.err == nil {
		if len(fw.buf) == 4+frameBytes {
			fw.flush(false)
		}
		room := min(len(p), 4+frameBytes-len(fw.buf))
		fw.buf = append(fw.buf, p[:room]...)
		p = p[room:]
	}
	return n - len(p), fw.err
}

func (fw *frameWriter) flush(last bool) {
	if fw.err != nil {
		return
	}
	fw.size += int64(len(fw.buf) - 4)
	length := uint32(len(fw.buf) - 4)
	if fw.aead != nil {
		length += gcmTag
	}
	if last {
		length |= lastFrame
	}
	binary.LittleEndian.PutUint32(fw.buf, length)
	if fw.aead != nil {
		fw.buf = fw.aead.Seal(fw.buf[:4], frameNonce(fw.number, last), fw.buf[4:], fw.buf[:4])
	} else {
		fw.chain = crc32.Update(fw.chain, castagnoli, fw.buf)
		fw.buf = binary.LittleEndian.AppendUint32(fw.buf, fw.chain)
	}
	_, fw.err = fw.w.Write(fw.buf)
	fw.number++
	fw.buf = fw.buf[:4]
}

// finish writes the last frame and the end.
func (fw *frameWriter) finish() error {
	fw.flush(true)
	if fw.err == nil {
		_, fw.err = fw.w.Write(encodeFooter(fw.size))
	}
	return fw.err
}

func encodeFooter(size int64) []byte {
	b := binary.LittleEndian.AppendUint64(make([]byte, 0, footerBytes), uint64(size))
	return binary.LittleEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
}

func parseFooter(b []byte) (int64, error) {
	if len(b) != footerBytes || binary.LittleEndian.Uint32(b[8:]) != crc32.Checksum(b[:8], castagnoli) {
		return 0, errors.New("its end is damaged")
	}
	return int64(binary.LittleEndian.Uint64(b)), nil
}

// frameReader gives back the content. It returns io.EOF only when it has seen
// all of the file and found it right.
type frameReader struct {
	r      io.Reader
	aead   cipher.AEAD
	chain  uint32
	number uint64
	size   int64
	buf    []byte
	rest   []byte // of buf, not given out
	last   bool
	err    error
}

// newFrameReader goes on behind head.
func newFrameReader(r io.Reader, head []byte, aead cipher.AEAD) *frameReader {
	return &frameReader{r: r, aead: aead, chain: crc32.Checksum(head, castagnoli)}
}

// Read implements io.Reader.
func (fr *frameReader) Read(p []byte) (int, error) {
	for len(fr.rest) == 0 && fr.err == nil {
		if fr.last {
			fr.err = fr.end()
		} else {
			fr.err = fr.frame()
		}
	}
	if len(fr.rest) == 0 {
		return 0, fr.err
	}
	n := copy(p, fr.rest)
	fr.rest = fr.rest[n:]
	return n, nil
}

func (fr *frameReader) frame() error {
	var head [4]byte
	if _, err := io.ReadFull(fr.r, head[:]); err != nil {
		return fmt.Errorf("frame %d: %w", fr.number, endsEarly(err))
	}
	length := binary.LittleEndian.Uint32(head[:])
	fr.last = length&lastFrame != 0
	n := int(length &^ lastFrame)
	if n > maxFrameBytes {
		return fmt.Errorf("frame %d: %d bytes", fr.number, n)
	}
	if fr.aead == nil {
		n += 4
	}
	if cap(fr.buf) < n {
		fr.buf = make([]byte, max(n, frameBytes+gcmTag))
	}
	b := fr.buf[:n]
	if _, err := io.ReadFull(fr.r, b); err != nil {
		return fmt.Errorf("frame %d: %w", fr.number, endsEarly(err))
	}
	if fr.aead != nil {
		var err error
		if fr.rest, err = fr.aead.Open(b[:0], frameNonce(fr.number, fr.last), b, head[:]); err != nil {
			return fmt.Errorf("frame %d does not open", fr.number)
		}
	} else {
		fr.chain = crc32.Update(crc32.Update(fr.chain, castagnoli, head[:]), castagnoli, b[:n-4])
		if fr.chain != binary.LittleEndian.Uint32(b[n-4:]) {
			return fmt.Errorf("checksum of frame %d does not match", fr.number)
		}
		fr.rest = b[:n-4]
	}
	fr.size += int64(len(fr.rest))
	fr.number++
	return nil
}

func (fr *frameReader) end() error {
	var b [footerBytes]byte
	if _, err := io.ReadFull(fr.r, b[:]); err != nil {
		return endsEarly(err)
	}
	size, err := parseFooter(b[:])
	if err != nil {
		return err
	}
	if size != fr.size {
		return fmt.Errorf("%d bytes of content where %d were written", fr.size, size)
	}
	return io.EOF
}

// summed passes what is read on to a hash.
type summed struct {
	r io.Reader
	h hash.Hash
}

func (s summed) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	s.h.Write(p[:n])
	return n, err
}
