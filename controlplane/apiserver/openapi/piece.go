package openapi

import (
	"bufio"
	"bytes"
	"compress/flate"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"slices"
	"sync"

	fast "github.com/klauspost/compress/flate"
)

// A document is a sequence of pieces: the description of each topic, the shared definitions, and
// short texts between them. Pieces are stored as deflate blocks, so their concatenation is a valid
// compressed stream. A new kind therefore adds one piece. All other pieces are unchanged and are
// shared by all documents.

// piece is a compressed part of OpenAPI documents, such as the definitions of one kind. Several
// documents can share it.
type piece struct {
	// deflate blocks that end at a byte boundary, without a final block and without references
	// before the piece
	zipped []byte
	size   int64
	crc    uint32
	sum    [sha256.Size]byte
}

func pieceOf(data, zipped []byte) *piece {
	return &piece{zipped: zipped, size: int64(len(data)), crc: crc32.ChecksumIEEE(data), sum: sha256.Sum256(data)}
}

// level is the compression level. The results are 10 % larger than those of the best useful level,
// but take only a fifth of the time.
const level = 4

// packers is a pool of compression writers, which need almost 1 MB each.
var packers = sync.Pool{New: func() any {
	w, err := fast.NewWriter(nil, level)
	if err != nil {
		panic(err) // the level is valid
	}
	return w
}}

// packPiece returns data as a compressed piece.
func packPiece(data []byte) (*piece, error) {
	w := packers.Get().(*fast.Writer)
	defer packers.Put(w)
	var buf bytes.Buffer
	w.Reset(&buf)
	if _, err := w.Write(data); err != nil {
		return nil, fmt.Errorf("compressing: %w", err)
	}
	if err := w.Flush(); err != nil {
		return nil, fmt.Errorf("compressing: %w", err)
	}
	return pieceOf(data, bytes.Clone(buf.Bytes())), nil
}

// plainPiece returns a piece with a short text, which is stored without compression.
func plainPiece(data string) *piece {
	n := uint16(len(data))
	zipped := binary.LittleEndian.AppendUint16([]byte{0}, n)
	zipped = binary.LittleEndian.AppendUint16(zipped, ^n)
	return pieceOf([]byte(data), append(zipped, data...))
}

// unpackBytes returns the uncompressed bytes of the piece.
func (p *piece) unpackBytes() ([]byte, error) {
	out := make([]byte, p.size)
	if _, err := io.ReadFull(flate.NewReader(bytes.NewReader(p.zipped)), out); err != nil {
		return nil, fmt.Errorf("decompressing a piece of an OpenAPI document: %w", err)
	}
	return out, nil
}

// parseMembers parses a piece that contains the members of a JSON object, without the braces. It
// returns the members by name.
func (p *piece) parseMembers() (out map[string]json.RawMessage, err error) {
	data, err := p.unpackBytes()
	if err == nil {
		err = json.Unmarshal(slices.Concat([]byte("{"), data, []byte("}")), &out)
	}
	return out, err
}

// comma separates pieces that are members of a JSON object.
var comma = plainPiece(",")

// joinWithCommas returns the pieces with commas between them.
func joinWithCommas(pieces []*piece) []*piece {
	out := make([]*piece, 0, 2*len(pieces))
	for i, p := range pieces {
		if i > 0 {
			out = append(out, comma)
		}
		out = append(out, p)
	}
	return out
}

// Start and end of a gzip stream.
var (
	gzipHead  = []byte{0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 0xff} // without name, time and operating system
	lastBlock = []byte{1, 0, 0, 0xff, 0xff}                   // empty
)

// sequence is a document, or a part of it, as a list of pieces.
type sequence []*piece

// zippedSize returns the number of bytes that writeZipped writes.
func (t sequence) zippedSize() (n int64) {
	for _, p := range t {
		n += int64(len(p.zipped))
	}
	return n + int64(len(gzipHead)+len(lastBlock)+8)
}

// checksum returns the CRC-32 of the uncompressed document, computed from those of the pieces.
func (t sequence) checksum() (crc uint32) {
	for _, p := range t {
		crc = joinedCRC(crc, p.crc, p.size)
	}
	return crc
}

// writeZipped writes the document as a gzip stream. crc is the CRC-32 of the uncompressed document.
func (t sequence) writeZipped(writer io.Writer, crc uint32) error {
	w := bufio.NewWriterSize(writer, 32<<10) // many pieces are small; Flush returns an earlier error
	_, _ = w.Write(gzipHead)
	for _, p := range t {
		_, _ = w.Write(p.zipped)
	}
	end := binary.LittleEndian.AppendUint32(bytes.Clone(lastBlock), crc)
	_, _ = w.Write(binary.LittleEndian.AppendUint32(end, uint32(t.plainSize())))
	return w.Flush()
}

// writePlain writes the uncompressed document.
func (t sequence) writePlain(w io.Writer) error {
	var zip io.ReadCloser
	for _, p := range t {
		in := io.Reader(bytes.NewReader(p.zipped))
		if zip == nil {
			zip = flate.NewReader(in)
		} else if err := zip.(flate.Resetter).Reset(in, nil); err != nil {
			return err
		}
		// A piece has no final block, so the decoder must not read beyond its size.
		if n, err := io.CopyN(w, zip, p.size); err != nil {
			if errors.Is(err, io.EOF) {
				err = fmt.Errorf("a piece of an OpenAPI document has %d bytes of %d", n, p.size)
			}
			return err
		}
	}
	return nil
}

// plainSize returns the uncompressed size of the document.
func (t sequence) plainSize() (n int64) {
	for _, p := range t {
		n += p.size
	}
	return n
}

// joinedCRC returns the CRC-32 of two concatenated texts from their CRCs. length is the size of the
// second text. A CRC is a polynomial remainder over GF(2), so that n further bytes multiply the
// first CRC by x^(8n).
func joinedCRC(crcA, crcB uint32, length int64) uint32 {
	const one = uint32(1) << 31  // bits are in reversed order
	power, square := one, one>>8 // power = 1, square = x^8
	for ; length > 0; length >>= 1 {
		if length&1 != 0 {
			power = timesModulo(power, square)
		}
		square = timesModulo(square, square)
	}
	return timesModulo(crcA, power) ^ crcB
}

// timesModulo multiplies two polynomials modulo the CRC-32 polynomial.
func timesModulo(a, b uint32) (out uint32) {
	for ; a != 0; a <<= 1 {
		if a&(1<<31) != 0 {
			out ^= b
		}
		low := b & 1
		b >>= 1
		if low != 0 {
			b ^= crc32.IEEE
		}
	}
	return out
}
