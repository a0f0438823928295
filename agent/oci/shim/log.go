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
	path         string
	fd           int
	size         int64
	limit        int64 // size at which to rotate; 0 = never
	files        int   // number of files, including the current one
	partialLines [2][]byte

	failing bool // the last write failed, and this was logged
}

// reopenFile opens the log file by its path again, after an external rotation has renamed it.
func (f *logFile) reopenFile() error {
	if f.path == "" {
		return nil
	}
	// Others may write to the log directory. A link or other file in the log's place is not used.
	const flags = syscall.O_WRONLY | syscall.O_CREAT | syscall.O_APPEND | syscall.O_CLOEXEC | syscall.O_NOFOLLOW |
		syscall.O_NONBLOCK
	fd, err := syscall.Open(f.path, flags, 0o640)
	if err != nil {
		return failure(describeError("open log "+f.path, err))
	}
	var st syscall.Stat_t
	if err = syscall.Fstat(fd, &st); err == nil && (st.Mode&syscall.S_IFMT != syscall.S_IFREG || st.Nlink > 1) {
		err = failure("it is not a regular file with a single link")
	}
	if err != nil {
		syscall.Close(fd)
		return failure(describeError("open log "+f.path, err))
	}
	f.size = st.Size
	f.closeFile()
	f.fd = fd
	return nil
}

func (f *logFile) closeFile() {
	if f.fd >= 0 {
		syscall.Close(f.fd)
		f.fd = -1
	}
}

// logOutput writes output of a stream (0 is stdout, 1 is stderr) to the log file, line by line. It
// buffers an incomplete last line.
func (f *logFile) logOutput(stream int, data []byte) {
	if f.fd < 0 {
		return
	}
	var stamp [30]byte
	appendTime(stamp[:0], unixNano())
	f.writeLines(appendLines(nil, stamp[:], stream, &f.partialLines[stream], data))
}

// flushPartialLine writes the buffered start of a line as a partial line, because its stream is
// closed.
func (f *logFile) flushPartialLine(stream int) {
	if f.fd >= 0 && len(f.partialLines[stream]) > 0 {
		var stamp [30]byte
		appendTime(stamp[:0], unixNano())
		f.writeLines(appendLine(nil, stamp[:], stream, 'P', f.partialLines[stream], nil))
		f.partialLines[stream] = nil
	}
}

// writeLines appends lines to the log file completely or not at all, and rotates the file first if
// they exceed its limit. If the disk is full, the lines are lost and the container continues.
func (f *logFile) writeLines(lines []byte) {
	if len(lines) == 0 {
		return
	}
	if f.limit > 0 && f.size > 0 && f.size+int64(len(lines)) > f.limit {
		f.rotateFiles()
	}
	if err := writeAll(f.fd, lines); err != nil {
		_ = syscall.Ftruncate(f.fd, f.size) // remove a partly written line, to which the next one would be appended
		if !f.failing {
			writeComplaint(describeError("write log "+f.path, err))
		}
		f.failing = true
		return
	}
	f.failing = false
	f.size += int64(len(lines))
}

// rotateFiles renames path to path.1, path.1 to path.2 and so on, and creates a new file at path;
// the oldest file is replaced. If no new file can be created, it truncates the current file: a log
// never exceeds its limit.
func (f *logFile) rotateFiles() {
	if f.files > 1 {
		next := f.path + ".next"
		_ = syscall.Unlink(next) // left by an interrupted rotation, or created by another program
		fd, err := syscall.Open(next,
			syscall.O_WRONLY|syscall.O_CREAT|syscall.O_EXCL|syscall.O_APPEND|syscall.O_CLOEXEC, 0o640)
		if err == nil {
			for i := f.files - 2; i >= 1; i-- {
				_ = syscall.Rename(f.path+"."+formatInt(i), f.path+"."+formatInt(i+1))
			}
			_ = syscall.Rename(f.path, f.path+".1")
			if err = syscall.Rename(next, f.path); err == nil {
				f.closeFile()
				f.fd, f.size = fd, 0
				return
			}
			syscall.Close(fd)
		}
		if !f.failing {
			writeComplaint(describeError("rotate log "+f.path, err))
		}
		f.failing = true
	}
	if err := syscall.Ftruncate(f.fd, 0); err == nil {
		f.size = 0
	}
}

// appendLines appends data, which is output of a stream, to dst as log lines with the timestamp
// stamp. held is an incomplete last line of earlier output. appendLines replaces it with the
// incomplete last line of data, which the next call continues.
func appendLines(dst, stamp []byte, stream int, held *[]byte, data []byte) []byte {
	for len(data) > 0 {
		end := -1
		for i := range data {
			if data[i] == '\n' {
				end = i
				break
			}
		}
		piece, whole := data, false
		if end >= 0 {
			piece, whole = data[:end], true
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
		*held, data = nil, data[end+1:]
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

// appendTime appends a time, in nanoseconds since 1970, as RFC 3339 with nine fractional digits: 30
// bytes.
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

func appendPadded(dst []byte, value int64, width int) []byte {
	var d [20]byte
	for i := width - 1; i >= 0; i-- {
		d[i] = byte('0' + value%10)
		value /= 10
	}
	return append(dst, d[:width]...)
}
