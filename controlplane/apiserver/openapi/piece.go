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

// A document is a sequence of pieces: what is said of each kind, the definitions that the kinds share, and a few words
// between them. Pieces are kept compressed, and in such a way that one after the other they are a compressed document.
// So one more definition among hundreds makes a piece of its own, and all others stand as they are, in every document once.

// piece is a part of documents.
type piece struct {
	zipped []byte // deflate blocks: they end with a byte, none is the last one, and none refers to what stands before the piece
	size   int64
	crc    uint32
	sum    [sha256.Size]byte
}

func pieceOf(data, zipped []byte) *piece {
	return &piece{zipped: zipped, size: int64(len(data)), crc: crc32.ChecksumIEEE(data), sum: sha256.Sum256(data)}
}

// level compresses to a tenth more than the slowest one that anybody uses, in a fifth of its time.
const level = 4

// packers are writers at work; each has most of a megabyte.
var packers = sync.Pool{New: func() any {
	w, err := fast.NewWriter(nil, level)
	if err != nil {
		panic(err) // the level is none, which it is not
	}
	return w
}}

// pack compresses a piece.
func pack(data []byte) (*piece, error) {
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

// words is a piece of a few bytes, which are stored as they are.
func words(data string) *piece {
	n := uint16(len(data))
	zipped := binary.LittleEndian.AppendUint16([]byte{0}, n)
	zipped = binary.LittleEndian.AppendUint16(zipped, ^n)
	return pieceOf([]byte(data), append(zipped, data...))
}

// unpack returns what was packed.
func (p *piece) unpack() ([]byte, error) {
	out := make([]byte, p.size)
	if _, err := io.ReadFull(flate.NewReader(bytes.NewReader(p.zipped)), out); err != nil {
		return nil, fmt.Errorf("decompressing a piece of an OpenAPI document: %w", err)
	}
	return out, nil
}

// members are those of the JSON object of which a piece is the inside.
func (p *piece) members() (out map[string]json.RawMessage, err error) {
	data, err := p.unpack()
	if err == nil {
		err = json.Unmarshal(slices.Concat([]byte("{"), data, []byte("}")), &out)
	}
	return out, err
}

// comma stands between pieces of which each is one member of a JSON object, or several.
var comma = words(",")

// listed are pieces with commas between them.
func listed(pieces []*piece) []*piece {
	out := make([]*piece, 0, 2*len(pieces))
	for i, p := range pieces {
		if i > 0 {
			out = append(out, comma)
		}
		out = append(out, p)
	}
	return out
}

// The frame of a compressed document.
var (
	gzipHead  = []byte{0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 0xff} // of no name, no time and no system
	lastBlock = []byte{1, 0, 0, 0xff, 0xff}                   // empty
)

// sequence is a whole document, or a part of one.
type sequence []*piece

// zippedSize is how many bytes writeZipped writes.
func (t sequence) zippedSize() (n int64) {
	for _, p := range t {
		n += int64(len(p.zipped))
	}
	return n + int64(len(gzipHead)+len(lastBlock)+8)
}

// crc is the checksum of the document.
func (t sequence) crc() (crc uint32) {
	for _, p := range t {
		crc = joinedCRC(crc, p.crc, p.size)
	}
	return crc
}

// writeZipped writes the document, which has a checksum, as one gzip stream.
func (t sequence) writeZipped(to io.Writer, crc uint32) error {
	w := bufio.NewWriterSize(to, 32<<10) // many pieces are small; an error is kept
	_, _ = w.Write(gzipHead)
	for _, p := range t {
		_, _ = w.Write(p.zipped)
	}
	end := binary.LittleEndian.AppendUint32(bytes.Clone(lastBlock), crc)
	_, _ = w.Write(binary.LittleEndian.AppendUint32(end, uint32(t.bytes())))
	return w.Flush()
}

// writePlain writes the document.
func (t sequence) writePlain(w io.Writer) error {
	var zip io.ReadCloser
	for _, p := range t {
		in := io.Reader(bytes.NewReader(p.zipped))
		if zip == nil {
			zip = flate.NewReader(in)
		} else if err := zip.(flate.Resetter).Reset(in, nil); err != nil {
			return err
		}
		// A piece has no last block: after its bytes there is nothing more to decode.
		if n, err := io.CopyN(w, zip, p.size); err != nil {
			if errors.Is(err, io.EOF) {
				err = fmt.Errorf("a piece of an OpenAPI document has %d bytes of %d", n, p.size)
			}
			return err
		}
	}
	return nil
}

// bytes is how long the document is.
func (t sequence) bytes() (n int64) {
	for _, p := range t {
		n += p.size
	}
	return n
}

// joinedCRC is the checksum of two texts, of which the second has a length, one after the other. A checksum is the rest of
// a division of polynomials over two elements: to stand before n bytes multiplies it by x to the power of 8n.
func joinedCRC(first, second uint32, length int64) uint32 {
	const one = uint32(1) << 31  // the coefficients stand in reverse
	power, square := one, one>>8 // x to the power of 8
	for ; length > 0; length >>= 1 {
		if length&1 != 0 {
			power = timesModulo(power, square)
		}
		square = timesModulo(square, square)
	}
	return timesModulo(first, power) ^ second
}

// timesModulo multiplies polynomials modulo that of the checksum.
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
