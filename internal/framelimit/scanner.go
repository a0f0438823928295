package framelimit

// frameScanner finds the headers of frames in the bytes of an HTTP/2 connection. It does not
// inspect the connection preface and the payloads of frames.
type frameScanner struct {
	bytesToSkip int             // remaining bytes of the preface or of a frame's payload
	head        [frameHead]byte // header of the latest frame
	headRead    int             // bytes of head that have been read; 0 after a complete header
}

// scanHeader reads data up to the end of the next frame header, which it stores in head. part is
// the part of the header that data contains, and rest is the data after it. complete is false if
// data ends before the header does.
func (f *frameScanner) scanHeader(data []byte) (part, rest []byte, complete bool) {
	skipped := min(f.bytesToSkip, len(data))
	f.bytesToSkip -= skipped
	data = data[skipped:]
	if f.bytesToSkip > 0 || len(data) == 0 {
		return nil, nil, false
	}
	copied := copy(f.head[f.headRead:], data)
	f.headRead += copied
	part, rest = data[:copied], data[copied:]
	if f.headRead < frameHead {
		return part, rest, false
	}
	f.headRead = 0
	f.bytesToSkip = int(f.head[0])<<16 | int(f.head[1])<<8 | int(f.head[2])
	return part, rest, true
}
