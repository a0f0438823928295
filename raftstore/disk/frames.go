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

// Snapshots and backups have the same format:
//
//	magic 8 │ format 4 │ length 4 │ header, JSON │ checksum 4
//	frames: length 4, highest bit = the last │ content │ checksum 4, unless encrypted
//	end: size of the content 8 │ checksum 4
//	backups: SHA-256 of all of it
//
// Each checksum continues the previous one. An encrypted frame is a message of AES-256-GCM under a
// key for this file and this header, and the nonce is its number. A missing, repeated, or moved
// frame is therefore detected like a flipped bit, and so is a truncated file.
const (
	containerFormat = 1
	frameBytes      = 128 << 10
	maxFrameBytes   = 1 << 20
	maxHeaderBytes  = 1 << 20
	lastFrame       = 1 << 31
	gcmTag          = 16
	footerBytes     = 12
)

// encodeHeader returns the complete header of a file. It consists of the magic, the format version
// and the length of the JSON content, then the content itself, which is header, and a checksum.
func encodeHeader(magic string, header []byte) []byte {
	b := append([]byte(magic), 0, 0, 0, 0, 0, 0, 0, 0)
	binary.LittleEndian.PutUint32(b[8:], containerFormat)
	binary.LittleEndian.PutUint32(b[12:], uint32(len(header)))
	b = append(b, header...)
	return binary.LittleEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
}

// formatError is the error for a file of another kind or format version. found describes the
// difference.
type formatError struct{ found string }

func (e *formatError) Error() string { return e.found }

// readHeader reads the header of a file, which must start with magic. header is the JSON content,
// and all is the complete header, including magic and checksum.
func readHeader(r io.Reader, magic string) (header, all []byte, err error) {
	var head [16]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, nil, truncationError(err)
	}
	if string(head[:8]) != magic {
		return nil, nil, &formatError{fmt.Sprintf("the file begins with %q, want %q", head[:8], magic)}
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
		return nil, nil, truncationError(err)
	}
	if crc32.Checksum(all[:16+n], castagnoli) != binary.LittleEndian.Uint32(all[16+n:]) {
		return nil, nil, errors.New("checksum of the header does not match")
	}
	return all[16 : 16+n], all, nil
}

func truncationError(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return errors.New("the file is truncated")
	}
	return err
}

// deriveFileKey returns the cipher for the frames of one file. secret is a data key, or a key that
// is used for this file only. head is the complete header of the file: a changed header results in
// another cipher.
func deriveFileKey(secret, salt, head []byte, purpose string) cipher.AEAD {
	sum := sha256.Sum256(head)
	return newAEAD(deriveKey(secret, salt, purpose+string(sum[:])))
}

func frameNonce(number uint64, last bool) []byte {
	b := make([]byte, 4, 12)
	if last {
		b[0] = 1
	}
	return binary.LittleEndian.AppendUint64(b, number)
}

// frameWriter splits the content that is written to it into frames, with checksums or encrypted.
type frameWriter struct {
	w      io.Writer
	aead   cipher.AEAD // nil if not encrypted
	chain  uint32
	number uint64
	size   int64
	buf    []byte // length and content of the current frame
	err    error
}

// newFrameWriter returns a frameWriter that writes to w. It first writes head, the complete header
// of the file. aead encrypts the frames; if aead is nil, they are not encrypted.
func newFrameWriter(w io.Writer, head []byte, aead cipher.AEAD) (*frameWriter, error) {
	fw := &frameWriter{
		w: w, aead: aead, chain: crc32.Checksum(head, castagnoli), buf: make([]byte, 4, 4+frameBytes+gcmTag),
	}
	_, fw.err = w.Write(head)
	return fw, fw.err
}

// Write implements io.Writer.
func (fw *frameWriter) Write(p []byte) (int, error) {
	n := len(p)
	for len(p) > 0 && fw.err == nil {
		if len(fw.buf) == 4+frameBytes {
			fw.writeFrame(false)
		}
		room := min(len(p), 4+frameBytes-len(fw.buf))
		fw.buf = append(fw.buf, p[:room]...)
		p = p[room:]
	}
	return n - len(p), fw.err
}

func (fw *frameWriter) writeFrame(last bool) {
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

// writeEnd writes the last frame, followed by the size and the last checksum of the file.
func (fw *frameWriter) writeEnd() error {
	fw.writeFrame(true)
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
		return 0, errors.New("the end of the file is damaged")
	}
	return int64(binary.LittleEndian.Uint64(b)), nil
}

// frameReader is an io.Reader of the content of a file's frames. It returns io.EOF only after it
// has verified the whole file.
type frameReader struct {
	r      io.Reader
	aead   cipher.AEAD
	chain  uint32
	number uint64
	size   int64
	buf    []byte
	rest   []byte // part of buf that Read has not returned yet
	last   bool
	err    error
}

// newFrameReader returns a reader of the content of the frames in r. head is the complete header of
// the file, which has been read from r already: the checksums of the frames continue its checksum.
// aead decrypts the frames; if aead is nil, they are not encrypted.
func newFrameReader(r io.Reader, head []byte, aead cipher.AEAD) *frameReader {
	return &frameReader{r: r, aead: aead, chain: crc32.Checksum(head, castagnoli)}
}

// Read implements io.Reader. It returns content only after it has verified the frame that contains
// it.
func (fr *frameReader) Read(p []byte) (int, error) {
	for len(fr.rest) == 0 && fr.err == nil {
		if fr.last {
			fr.err = fr.readEnd()
		} else {
			fr.err = fr.readFrame()
		}
	}
	if len(fr.rest) == 0 {
		return 0, fr.err
	}
	n := copy(p, fr.rest)
	fr.rest = fr.rest[n:]
	return n, nil
}

func (fr *frameReader) readFrame() error {
	var head [4]byte
	if _, err := io.ReadFull(fr.r, head[:]); err != nil {
		return fmt.Errorf("frame %d: %w", fr.number, truncationError(err))
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
		return fmt.Errorf("frame %d: %w", fr.number, truncationError(err))
	}
	if fr.aead != nil {
		var err error
		if fr.rest, err = fr.aead.Open(b[:0], frameNonce(fr.number, fr.last), b, head[:]); err != nil {
			return fmt.Errorf("frame %d cannot be decrypted", fr.number)
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

func (fr *frameReader) readEnd() error {
	var b [footerBytes]byte
	if _, err := io.ReadFull(fr.r, b[:]); err != nil {
		return truncationError(err)
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

// hashingReader is an io.Reader that adds all bytes that it reads to a hash.
type hashingReader struct {
	r io.Reader
	h hash.Hash
}

func (s hashingReader) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	s.h.Write(p[:n])
	return n, err
}
