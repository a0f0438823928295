// Package sector implements the format of the files to which a raft log is written: sectors of 512
// bytes, each with a checksum. A disk writes a sector completely or not at all. After a crash each
// sector therefore has its previous content or the new content, or was never written (zeros). Any
// other content is damage. This distinguishes an append that a crash interrupted, which may be
// dropped, from an acknowledged append that was damaged later, which must not be dropped.
//
//	0 checksum of 4..512, seeded with file and offset │ 4 run │ 8 number │ 16 content
package sector

import (
	"encoding/binary"
	"errors"
	"hash/crc32"
	"slices"
)

// ErrCorruptLog is returned for a log with files that do not contain the data written to them.
var ErrCorruptLog = errors.New("raftstore: log is corrupt")

const (
	// Size is the size of a sector in bytes.
	Size = 512
	// HeaderSize is the size of the header of a sector in bytes.
	HeaderSize = 16
	// ContentSize is the number of content bytes in a sector.
	ContentSize = Size - HeaderSize
)

// State is the state of a sector that was read.
type State uint8

const (
	Empty   State = iota // never written
	Valid                // as written
	Damaged              // damaged, or written for another file or offset
)

// Stamp identifies the write that produced a sector. The zero value is not used.
type Stamp struct {
	Run    uint32 // random number of the process's opening of the file
	Number uint64 // defined by the format of the file
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Seal writes the header of the sector at the start of b: checksum and stamp. The content of the
// sector must be complete. seed identifies the file; offset is the sector's offset in the file.
func Seal(b []byte, seed uint32, offset int64, s Stamp) {
	b = b[:Size]
	binary.LittleEndian.PutUint32(b[4:], s.Run)
	binary.LittleEndian.PutUint64(b[8:], s.Number)
	binary.LittleEndian.PutUint32(b, Checksum(b, seed, offset))
}

// Checksum returns the checksum of the sector b, without the four bytes that store it. seed
// identifies the file; offset is the sector's offset in the file.
func Checksum(b []byte, seed uint32, offset int64) uint32 {
	return crc32.Update(seed+uint32(offset/Size), castagnoli, b[4:Size])
}

// CheckStamp returns the stamp and the state of the sector at the start of b. The stamp is zero
// unless the state is Valid. seed and offset must be those that were passed to Seal.
func CheckStamp(b []byte, seed uint32, offset int64) (Stamp, State) {
	b = b[:Size]
	s := Stamp{Run: binary.LittleEndian.Uint32(b[4:]), Number: binary.LittleEndian.Uint64(b[8:])}
	switch {
	case s == (Stamp{}) && [Size]byte(b) == [Size]byte{}:
		return s, Empty
	case s == (Stamp{}) || binary.LittleEndian.Uint32(b) != Checksum(b, seed, offset):
		return Stamp{}, Damaged
	}
	return s, Valid
}

// Content returns the content of the sector at the start of b.
func Content(b []byte) []byte { return b[HeaderSize:Size] }

// CountFor returns the number of sectors that are needed for the given number of content bytes.
func CountFor(content int64) int64 { return (content + ContentSize - 1) / ContentSize }

// maxBuffer is the capacity in bytes that a Buffer keeps when it is reset.
const maxBuffer = 2 << 20

// Buffer divides content into sectors, and adds their headers. The zero value is an empty buffer. A
// Buffer can be reused after Reset.
type Buffer struct {
	buf []byte
	end int // index in buf at which the content ends
}

// Reset empties the buffer. It releases the memory of unusually large content.
func (w *Buffer) Reset() {
	if cap(w.buf) > maxBuffer {
		w.buf = nil
	}
	w.buf, w.end = w.buf[:0], 0
}

// Append adds content at the end.
func (w *Buffer) Append(p []byte) {
	for len(p) > 0 {
		if w.end == len(w.buf) {
			at := len(w.buf)
			if cap(w.buf) < at+Size {
				w.buf = append(make([]byte, 0, max(2*cap(w.buf), 16*Size)), w.buf...)
			}
			w.buf = w.buf[:at+Size]
			w.end = at + HeaderSize
		}
		n := copy(w.buf[w.end:], p)
		w.end += n
		p = p[n:]
	}
}

// SealNumbered writes the headers of all sectors and returns the sectors. The first sector has the
// stamp s; the Number of the stamp rises by one per sector. seed identifies the file; offset is the
// offset of the first sector in the file. The result is valid until the next call of Reset.
func (w *Buffer) SealNumbered(seed uint32, offset int64, s Stamp) []byte {
	return w.seal(seed, offset, s, 1)
}

// SealUniform does the same as SealNumbered, but all sectors have the same stamp.
func (w *Buffer) SealUniform(seed uint32, offset int64, s Stamp) []byte {
	return w.seal(seed, offset, s, 0)
}

// Extend adds n zero bytes behind the sealed sectors, and returns the sectors with these bytes. The
// result is valid until the next call of Reset.
func (w *Buffer) Extend(n int) []byte {
	end := len(w.buf)
	w.buf = slices.Grow(w.buf, n)[:end+n]
	clear(w.buf[end:])
	return w.buf
}

func (w *Buffer) seal(seed uint32, offset int64, s Stamp, step uint64) []byte {
	clear(w.buf[w.end:])
	for from := 0; from < len(w.buf); from += Size {
		Seal(w.buf[from:], seed, offset+int64(from), s)
		s.Number += step
	}
	return w.buf
}
