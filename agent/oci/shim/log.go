package shim

import "syscall"

// maxLine is the longest part of a line that is buffered; longer lines are written in parts.
const maxLine = 16 << 10

// logFile writes a container's output in the CRI log format:
//
//	2006-01-02T15:04:05.000000000Z stdout F line
//
// The tag P instead of F marks a partial line: it continues, or is a last line without a newline.
type logFile struct {
	path  string
	fd    int
	size  int64
	limit int64 // size at which to rotate; 0 = never
	files int   // number of files, including the current one
	held  [2][]byte

	failing bool // the last write failed, and this was logged
}

// reopen opens the log file by its path again, after an external rotation has renamed it.
func (f *logFile) reopen() error {
	if f.path == "" {
		return nil
	}
	// Others may write to the log directory. A link or other file in the log's place is not used.
	const flags = syscall.O_WRONLY | syscall.O_CREAT | syscall.O_APPEND | syscall.O_CLOEXEC | syscall.O_NOFOLLOW | syscall.O_NONBLOCK
	fd, err := syscall.Open(f.path, flags, 0o640)
	if err != nil {
		return failure(describe("open log "+f.path, err))
	}
	var st syscall.Stat_t
	if err = syscall.Fstat(fd, &st); err == nil && (st.Mode&syscall.S_IFMT != syscall.S_IFREG || st.Nlink > 1) {
		err = failure("it is no file of its own")
	}
	if err != nil {
		syscall.Close(fd)
		return failure(describe("open log "+f.path, err))
	}
	f.size = st.Size
	f.close()
	f.fd = fd
	return nil
}

func (f *logFile) close() {
	if f.fd >= 0 {
		syscall.Close(f.fd)
		f.fd = -1
	}
}

// write logs output of a stream (0 is stdout).
func (f *logFile) write(stream int, b []byte) {
	if f.fd < 0 {
		return
	}
	var stamp [30]byte
	appendTime(stamp[:0], now())
	f.put(appendLines(nil, stamp[:], stream, &f.held[stream], b))
}

// flush writes the buffered part of an unterminated line as a partial line. The stream is closed.
func (f *logFile) flush(stream int) {
	if f.fd >= 0 && len(f.held[stream]) > 0 {
		var stamp [30]byte
		appendTime(stamp[:0], now())
		f.put(appendLine(nil, stamp[:], stream, 'P', f.held[stream], nil))
		f.held[stream] = nil
	}
}

// put writes lines completely or not at all. If the disk is full, the lines are lost and the
// container continues.
func (f *logFile) put(lines []byte) {
	if len(lines) == 0 {
		return
	}
	if f.limit > 0 && f.size > 0 && f.size+int64(len(lines)) > f.limit {
		f.rotate()
	}
	if err := writeAll(f.fd, lines); err != nil {
		_ = syscall.Ftruncate(f.fd, f.size) // remove a partly written line, to which the next one would be appended
		if !f.failing {
			complain(describe("write log "+f.path, err))
		}
		f.failing = true
		return
	}
	f.failing = false
	f.size += int64(len(lines))
}

// rotate renames path to path.1, path.1 to path.2 and so on; the oldest file is replaced. If no new
// file can be created, it truncates the current one: a log never exceeds its limit.
func (f *logFile) rotate() {
	if f.files > 1 {
		next := f.path + ".next"
		_ = syscall.Unlink(next) // left by an interrupted rotation, or created by another program
		fd, err := syscall.Open(next, syscall.O_WRONLY|syscall.O_CREAT|syscall.O_EXCL|syscall.O_APPEND|syscall.O_CLOEXEC,
			0o640)
		if err == nil {
			for i := f.files - 2; i >= 1; i-- {
				_ = syscall.Rename(f.path+"."+itoa(i), f.path+"."+itoa(i+1))
			}
			_ = syscall.Rename(f.path, f.path+".1")
			if err = syscall.Rename(next, f.path); err == nil {
				f.close()
				f.fd, f.size = fd, 0
				return
			}
			syscall.Close(fd)
		}
		if !f.failing {
			complain(describe("rotate log "+f.path, err))
		}
		f.failing = true
	}
	if err := syscall.Ftruncate(f.fd, 0); err == nil {
		f.size = 0
	}
}

// appendLines appends b to dst as log lines. held is the start of a line without its end yet.
func appendLines(dst, stamp []byte, stream int, held *[]byte, b []byte) []byte {
	for len(b) > 0 {
		end := -1
		for i := range b {
			if b[i] == '\n' {
				end = i
				break
			}
		}
		piece, whole := b, false
		if end >= 0 {
			piece, whole = b[:end], true
		}
		for len(*held)+len(piece) > maxLine {
			n := maxLine - len(*held)
			dst = appendLine(dst, stamp, stream, 'P', *held, piece[:n])
			*held, piece = nil, piece[n:]
		}
		if !whole {
			*held = append(*held, piece...)
			return dst
		}
		dst = appendLine(dst, stamp, stream, 'F', *held, piece)
		*held, b = nil, b[end+1:]
	}
	return dst
}

func appendLine(dst, stamp []byte, stream int, tag byte, held, piece []byte) []byte {
	dst = append(dst, stamp...)
	if stream == 0 {
		dst = append(dst, " stdout "...)
	} else {
		dst = append(dst, " stderr "...)
	}
	dst = append(dst, tag, ' ')
	dst = append(dst, held...)
	dst = append(dst, piece...)
	return append(dst, '\n')
}

// appendTime appends ns since 1970 as RFC 3339 with nine digits, 30 bytes.
func appendTime(dst []byte, ns int64) []byte {
	sec, frac := ns/1e9, ns%1e9
	days, rest := sec/86400, sec%86400
	// Civil date from a day count, in eras of 400 years that start on 1 March.
	z := days + 719468
	era := z / 146097
	doe := z - era*146097
	yoe := (doe - doe/1460 + doe/36524 - doe/146096) / 365
	doy := doe - (365*yoe + yoe/4 - yoe/100)
	mp := (5*doy + 2) / 153
	day := doy - (153*mp+2)/5 + 1
	month := mp + 3
	year := yoe + era*400
	if month > 12 {
		month -= 12
		year++
	}
	dst = appendPadded(dst, year, 4)
	dst = appendPadded(append(dst, '-'), month, 2)
	dst = appendPadded(append(dst, '-'), day, 2)
	dst = appendPadded(append(dst, 'T'), rest/3600, 2)
	dst = appendPadded(append(dst, ':'), rest/60%60, 2)
	dst = appendPadded(append(dst, ':'), rest%60, 2)
	dst = appendPadded(append(dst, '.'), frac, 9)
	return append(dst, 'Z')
}

func appendPadded(dst []byte, v int64, width int) []byte {
	var d [20]byte
	for i := width - 1; i >= 0; i-- {
		d[i] = byte('0' + v%10)
		v /= 10
	}
	return append(dst, d[:width]...)
}
