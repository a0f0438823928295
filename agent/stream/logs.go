package stream

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/internal/safepath"
)

// errLimit is returned when LogRequest.LimitBytes bytes of a log have been written.
var errLimit = errors.New("limit reached")

// logPrinter writes the text of log lines in the format that the LogRequest specifies.
type logPrinter struct {
	w       io.Writer
	request agent.LogRequest
	written int64
	open    [2]bool // a partial line of the stream was written last; index 1 is stderr
}

func (p *logPrinter) printLine(b []byte) error {
	l, ok := parseLine(b)
	if !ok {
		return nil
	}
	if !p.request.Since.IsZero() && l.writtenAt().Before(p.request.Since) {
		return nil
	}
	stream := 0
	if l.stderr {
		stream = 1
	}
	var out []byte
	if p.request.Timestamps && !p.open[stream] {
		out = append(append(out, l.stamp...), ' ')
	}
	out = append(out, l.text...)
	if !l.partial {
		out = append(out, '\n')
	}
	p.open[stream] = l.partial
	if p.request.LimitBytes > 0 && p.written+int64(len(out)) >= p.request.LimitBytes {
		out = out[:p.request.LimitBytes-p.written]
		_, err := p.w.Write(out)
		return errors.Join(err, errLimit)
	}
	p.written += int64(len(out))
	_, err := p.w.Write(out)
	return err
}

// logFiles returns the files of the log at path, oldest first and the live file last. Log rotation
// renames path to path.1 and path.1 to path.2, or path to path.TIME.
func logFiles(path string) ([]string, error) {
	all, err := filepath.Glob(path + ".*")
	if err != nil {
		return nil, err
	}
	type old struct {
		name string
		n    int // 0 for a file with a time
	}
	var olds []old
	for _, f := range all {
		suffix := strings.TrimPrefix(f, path+".")
		n, err := strconv.Atoi(suffix)
		if err != nil && (strings.Contains(suffix, ".") || len(suffix) < len("20060102")) {
			continue // compressed, or not a log file of this container
		}
		if len(suffix) >= len("20060102") {
			n = 0
		}
		olds = append(olds, old{f, n})
	}
	slices.SortFunc(olds, func(a, b old) int {
		if a.n != b.n {
			return b.n - a.n
		}
		return strings.Compare(a.name, b.name)
	})
	var out []string
	for _, o := range olds {
		out = append(out, o.name)
	}
	if _, err := os.Stat(path); err == nil {
		out = append(out, path)
	}
	return out, nil
}

// tailStart returns where the last n lines of a log start: the index of a file in files and an
// offset in that file.
func tailStart(files []string, n int64) (index int, offset int64, err error) {
	if n == 0 && len(files) > 0 {
		st, err := os.Stat(files[len(files)-1])
		if err != nil {
			return 0, 0, err
		}
		return len(files) - 1, st.Size(), nil
	}
	for i := len(files) - 1; i >= 0; i-- {
		found, off, err := lastLines(files[i], n)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return 0, 0, err
		}
		if n -= found; n == 0 {
			return i, off, nil
		}
	}
	return 0, 0, nil
}

// lastLines searches backwards from the end of a file for its last n lines. It returns how many
// lines it found, and the offset of the first of these lines.
func lastLines(file string, n int64) (found, offset int64, err error) {
	f, err := safepath.OpenRegular(file)
	if err != nil {
		return 0, 0, err
	}
	defer f.Close()
	end, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return 0, 0, err
	}
	buf := make([]byte, 64<<10)
	last := true // the newline at the end of the file does not start another line
	for pos := end; pos > 0; {
		size := min(pos, int64(len(buf)))
		pos -= size
		if _, err := f.ReadAt(buf[:size], pos); err != nil {
			return 0, 0, err
		}
		for i := size - 1; i >= 0; i-- {
			if last {
				last = false
				if buf[i] == '\n' {
					continue
				}
			}
			if buf[i] == '\n' {
				if found++; found == n {
					return found, pos + i + 1, nil
				}
			}
		}
	}
	if end > 0 {
		found++
	}
	return found, 0, nil
}

// logReader reads a container log across rotations.
type logReader struct {
	path    string
	f       *os.File
	buf     *bufio.Reader
	partial []byte // the start of a line that is not completely written yet
}

func (r *logReader) openFile(file string, offset int64) error {
	f, err := safepath.OpenRegular(file)
	if err != nil {
		return err
	}
	if _, err := f.Seek(offset, io.SeekStart); err != nil {
		f.Close()
		return err
	}
	r.closeFile()
	r.f, r.buf, r.partial = f, bufio.NewReaderSize(f, 32<<10), nil
	return nil
}

func (r *logReader) closeFile() {
	if r.f != nil {
		r.f.Close()
		r.f = nil
	}
}

// readLines reads the open file to its current end, and calls handleLine with every complete line.
// An incomplete last line is kept in r.partial.
func (r *logReader) readLines(ctx context.Context, handleLine func([]byte) error) error {
	for {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		b, err := r.buf.ReadSlice('\n')
		if err == nil && len(r.partial) == 0 {
			if err := handleLine(b); err != nil {
				return err
			}
			continue
		}
		r.partial = append(r.partial, b...)
		switch {
		case err == nil:
			whole := r.partial
			r.partial = nil
			if err := handleLine(whole); err != nil {
				return err
			}
		case errors.Is(err, bufio.ErrBufferFull):
			if len(r.partial) > 1<<20 {
				r.partial = r.partial[:0] // longer than any line that a runtime writes
			}
		case errors.Is(err, io.EOF):
			return nil
		default:
			return fmt.Errorf("reading log %s: %w", r.path, err)
		}
	}
}

// nextFile continues with the next newer file of the log, after it has read the current file to its
// end. It reports whether there was a newer file. Rotation may rename files at the same time.
// Therefore the newer file is used only if it still follows the current file after it was opened.
func (r *logReader) nextFile(ctx context.Context, each func([]byte) error) (moved bool, err error) {
	here, err := r.f.Stat()
	if err != nil {
		return false, err
	}
	for range 100 {
		next, state, err := r.findSuccessor(here)
		if err != nil {
			return false, fmt.Errorf("reading log %s: %w", r.path, err)
		}
		switch state {
		case isRotating:
			continue
		case isLive:
			return r.reopenTruncated(here)
		}
		f, err := safepath.OpenRegular(next)
		if err != nil {
			continue
		}
		opened, err := f.Stat()
		again, state, _ := r.findSuccessor(here)
		if st, serr := os.Stat(again); err != nil || state != hasSuccessor || serr != nil || !os.SameFile(st, opened) {
			f.Close()
			continue
		}
		// Lines written between the last read and the rotation.
		if err := r.readLines(ctx, each); err != nil {
			f.Close()
			return false, err
		}
		r.closeFile()
		r.f, r.buf, r.partial = f, bufio.NewReaderSize(f, 32<<10), nil
		return true, nil
	}
	return false, nil // continuous rotation: the next change of the folder retries
}

// filePosition states whether a file is the newest of its log.
type filePosition int

const (
	hasSuccessor filePosition = iota // another file follows
	isLive                           // it is the live file
	isRotating                       // the file was not found in the log's files: a rotation is in progress
)

// findSuccessor searches for the log file that is the next newer one after the current file. It
// returns its path, and the position of the current file in the log.
func (r *logReader) findSuccessor(current os.FileInfo) (next string, p filePosition, err error) {
	files, err := logFiles(r.path)
	if err != nil {
		return "", isRotating, err
	}
	for i, f := range files {
		if st, err := os.Stat(f); err == nil && os.SameFile(st, current) {
			if i+1 == len(files) {
				return "", isLive, nil
			}
			return files[i+1], hasSuccessor, nil
		}
	}
	st, err := r.f.Stat()
	if err != nil {
		return "", isRotating, err
	}
	if sys, ok := st.Sys().(*syscall.Stat_t); ok && sys.Nlink > 0 {
		return "", isRotating, nil
	}
	if len(files) == 0 {
		return "", isLive, nil
	}
	return files[0], hasSuccessor, nil // the current file was deleted: the oldest remaining file follows
}

// reopenTruncated continues at the start of the log file if the file was truncated in place. st is
// the file's status. It reports whether the file was truncated.
func (r *logReader) reopenTruncated(st os.FileInfo) (bool, error) {
	pos, err := r.f.Seek(0, io.SeekCurrent)
	if err != nil || st.Size() >= pos {
		return false, err
	}
	return true, r.openFile(r.path, 0)
}

// copyLog writes the part of the log at path that the request selects to w. If the request follows
// the log, it continues until ended is closed and everything is read.
func (s *Server) copyLog(
	ctx context.Context, path string, request agent.LogRequest, w io.Writer, ended <-chan struct{},
) error {
	p := &logPrinter{w: w, request: request}
	var n *notifier
	if request.Follow {
		// Created before the first read, so that no change is missed.
		var err error
		if n, err = s.watcher.newNotifier(filepath.Dir(path)); err != nil {
			return err
		}
		defer n.closeNotifier()
	}
	files, err := logFiles(path)
	if err != nil {
		return err
	}
	r := &logReader{path: path}
	defer r.closeFile()
	if len(files) > 0 {
		index, offset := 0, int64(0)
		if request.TailLines >= 0 {
			if index, offset, err = tailStart(files, request.TailLines); err != nil {
				return fmt.Errorf("reading log %s: %w", path, err)
			}
		} else {
			index = firstSince(files, request.Since)
		}
		if err := r.openFile(files[index], offset); err != nil {
			return fmt.Errorf("reading log %s: %w", path, err)
		}
	}
	err = r.copyLines(ctx, p, n, ended)
	if errors.Is(err, errLimit) {
		return nil
	}
	return err
}

// firstSince returns the index of the first log file that was modified at startTime or later. If
// there is no such file, it returns the index of the last file. files are ordered from old to new
// and not empty.
func firstSince(files []string, startTime time.Time) int {
	for i, f := range files[:len(files)-1] {
		if st, err := os.Stat(f); err == nil && !st.ModTime().Before(startTime) {
			return i
		}
	}
	return len(files) - 1
}

func (r *logReader) copyLines(ctx context.Context, p *logPrinter, n *notifier, over <-chan struct{}) error {
	last := n == nil
	for {
		if r.f == nil {
			if err := r.openFile(r.path, 0); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return fmt.Errorf("reading log %s: %w", r.path, err)
			}
		}
		if r.f != nil {
			if err := r.readLines(ctx, p.printLine); err != nil {
				return err
			}
			moved, err := r.nextFile(ctx, p.printLine)
			if err != nil {
				return err
			}
			if moved {
				continue
			}
		}
		if last {
			return r.printRest(p)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-over:
			last = true // one more round: the last lines were written before the end was signaled
		case _, ok := <-n.ch:
			last = !ok
		}
	}
}

// printRest prints the last line of a log if it does not end in a newline.
func (r *logReader) printRest(p *logPrinter) error {
	if len(bytes.TrimSpace(r.partial)) == 0 {
		return nil
	}
	return p.printLine(r.partial)
}
