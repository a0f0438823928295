package disk

import (
	"encoding/binary"
	"hash/crc32"
)

// The journal and the segments of the log are files of sectors, each of which
// checks itself. A disk writes a sector whole or not at all, so after a crash
// every sector is as it was before or as it was to be, or was never written
// (zeros). A sector that is none of these was damaged. Without this nobody
// could tell an append that a crash cut short, which may be dropped, from one
// that was acknowledged and went bad, which may not.
//
//	0 checksum of 4..512, seeded with the file and the place │ 4 run │ 8 number │ 16 room for content
const (
	sectorBytes = 512
	sectorHead  = 16
	sectorRoom  = sectorBytes - sectorHead
)

// sectorKind is what is found in a place for a sector.
type sectorKind uint8

const (
	sectorEmpty sectorKind = iota // never written
	sectorGood
	sectorBad // damaged, or of another file or place
)

// sectorStamp is what a sector says of itself, besides its content.
type sectorStamp struct {
	run    uint32 // which opening of the file wrote it
	number uint64
}

// sealSector fills in the head of a sector whose content is there.
func sealSector(b []byte, seed uint32, at int64, s sectorStamp) {
	b = b[:sectorBytes]
	binary.LittleEndian.PutUint32(b[4:], s.run)
	binary.LittleEndian.PutUint64(b[8:], s.number)
	binary.LittleEndian.PutUint32(b, sectorSum(b, seed, at))
}

func sectorSum(b []byte, seed uint32, at int64) uint32 {
	return crc32.Update(seed+uint32(at/sectorBytes), castagnoli, b[4:sectorBytes])
}

// readSector judges a sector.
func readSector(b []byte, seed uint32, at int64) (sectorStamp, sectorKind) {
	b = b[:sectorBytes]
	s := sectorStamp{run: binary.LittleEndian.Uint32(b[4:]), number: binary.LittleEndian.Uint64(b[8:])}
	switch {
	case s == (sectorStamp{}) && [sectorBytes]byte(b) == [sectorBytes]byte{}:
		return s, sectorEmpty
	case s == (sectorStamp{}) || binary.LittleEndian.Uint32(b) != sectorSum(b, seed, at):
		return sectorStamp{}, sectorBad
	}
	return s, sectorGood
}

// sectorWriter lays content out over sectors, in a buffer that is used again.
type sectorWriter struct {
	buf []byte
	end int // of the content, in buf
}

func (w *sectorWriter) reset() {
	if cap(w.buf) > 2<<20 {
		w.buf = nil // a rare large record does not stay in memory
	}
	w.buf, w.end = w.buf[:0], 0
}

func (w *sectorWriter) put(p []byte) {
	for len(p) > 0 {
		if w.end == len(w.buf) {
			at := len(w.buf)
			if cap(w.buf) < at+sectorBytes {
				w.buf = append(make([]byte, 0, max(2*cap(w.buf), 16*sectorBytes)), w.buf...)
			}
			w.buf = w.buf[:at+sectorBytes]
			w.end = at + sectorHead
		}
		n := copy(w.buf[w.end:], p)
		w.end += n
		p = p[n:]
	}
}

// finish clears what is left of the last sector and seals all: numbers rise by one from number.
func (w *sectorWriter) finish(seed uint32, at int64, s sectorStamp) []byte {
	clear(w.buf[w.end:])
	for from := 0; from < len(w.buf); from += sectorBytes {
		sealSector(w.buf[from:], seed, at+int64(from), s)
		s.number++
	}
	return w.buf
}

// sectorsFor is how many sectors so much content takes.
func sectorsFor(content int64) int64 { return (content + sectorRoom - 1) / sectorRoom }
