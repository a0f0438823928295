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

// errLimit ends a log after LimitBytes.
var errLimit = errors.New("limit reached")

// printer writes the text of log lines as the request wants it.
type printer struct {
	w       io.Writer
	q       agent.LogRequest
	written int64
	open    [2]bool // a partial line of the stream has been written
}

func (p *printer) line(b []byte) error {
	l, ok := parseLine(b)
	if !ok {
		return nil
	}
	if !p.q.Since.IsZero() && l.time().Before(p.q.Since) {
		return nil
	}
	stream := 0
	if l.stderr {
		stream = 1
	}
	var out []byte
	if p.q.Timestamps && !p.open[stream] {
		out = append(append(out, l.stamp...), ' ')
	}
	out = append(out, l.text...)
	if !l.partial {
		out = append(out, '\n')
	}
	p.open[stream] = l.partial
	if p.q.LimitBytes > 0 && p.written+int64(len(out)) >= p.q.LimitBytes {
		out = out[:p.q.LimitBytes-p.written]
		_, err := p.w.Write(out)
		return errors.Join(err, errLimit)
	}
	p.written += int64(len(out))
	_, err := p.w.Write(out)
	return err
}

// chain lists the files of a log, the oldest first and the live one last: whoever
// rotates moves path to path.1 and that to path.2, or to path.TIME.
func chain(path string) ([]string, error) {
	all, err := filepath.Glob(path + ".*")
	if err != nil {
		return nil, err
	}
	type old struct {
		name string
		n    int // 0 for a time
	}
	var olds []old
	for _, f := range all {
		suffix := strings.TrimPrefix(f, path+".")
		n, err := strconv.Atoi(suffix)
		if err != nil && (strings.Contains(suffix, ".") || len(suffix) < len("20060102")) {
			continue // compressed, or not ours
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

// tailStart finds where the last n lines begin: a file of the chain and an offset in it.
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

// lastLines counts up to n lines from a file's end and returns where the first of them begins.
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
	last := true // the byte after the newline that ends the file begins no line
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

// reader follows a log through its rotations.
type reader struct {
	path string
	f    *os.File
	buf  *bufio.Reader
	held []byte // the start of a line whose end is not written yet
}

func (r *reader) open(file string, offset int64) error {
	f, err := safepath.OpenRegular(file)
	if err != nil {
		return err
	}
	if _, err := f.Seek(offset, io.SeekStart); err != nil {
		f.Close()
		return err
	}
	r.close()
	r.f, r.buf, r.held = f, bufio.NewReaderSize(f, 32<<10), nil
	return nil
}

func (r *reader) close() {
	if r.f != nil {
		r.f.Close()
		r.f = nil
	}
}

// drain reads all whole lines that are there.
func (r *reader) drain(ctx context.Context, each func([]byte) error) error {
	for {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		b, err := r.buf.ReadSlice('\n')
		if err == nil && len(r.held) == 0 {
			if err := each(b); err != nil {
				return err
			}
			continue
		}
		r.held = append(r.held, b...)
		switch {
		case err == nil:
			whole := r.held
			r.held = nil
			if err := each(whole); err != nil {
				return err
			}
		case errors.Is(err, bufio.ErrBufferFull):
			if len(r.held) > 1<<20 {
				r.held = r.held[:0] // no writer makes such a line: it is not a log
			}
		case errors.Is(err, io.EOF):
			return nil
		default:
			return fmt.Errorf("reading log %s: %w", r.path, err)
		}
	}
}

// advance moves to the file after the open one, when there is one. Names move while we look, so
// a step counts only when both files are seen side by side after the next one was opened.
func (r *reader) advance(ctx context.Context, each func([]byte) error) (moved bool, err error) {
	here, err := r.f.Stat()
	if err != nil {
		return false, err
	}
	for range 100 {
		next, state, err := r.successor(here)
		if err != nil {
			return false, fmt.Errorf("reading log %s: %w", r.path, err)
		}
		switch state {
		case moving:
			continue
		case newest:
			return r.truncated(here)
		}
		f, err := safepath.OpenRegular(next)
		if err != nil {
			continue
		}
		opened, err := f.Stat()
		again, state, _ := r.successor(here)
		if st, serr := os.Stat(again); err != nil || state != older || serr != nil || !os.SameFile(st, opened) {
			f.Close()
			continue
		}
		// What was written between the last look and the rotation.
		if err := r.drain(ctx, each); err != nil {
			f.Close()
			return false, err
		}
		r.close()
		r.f, r.buf, r.held = f, bufio.NewReaderSize(f, 32<<10), nil
		return true, nil
	}
	return false, nil // rotating all the time: the folder's next change brings us back
}

// place is where a file stands in its log's chain.
type place int

const (
	older  place = iota // another one follows it
	newest              // it is the live one
	moving              // it has a name that was not seen: somebody rotates just now
)

// successor names the file after here.
func (r *reader) successor(here os.FileInfo) (next string, p place, err error) {
	files, err := chain(r.path)
	if err != nil {
		return "", moving, err
	}
	for i, f := range files {
		if st, err := os.Stat(f); err == nil && os.SameFile(st, here) {
			if i+1 == len(files) {
				return "", newest, nil
			}
			return files[i+1], older, nil
		}
	}
	st, err := r.f.Stat()
	if err != nil {
		return "", moving, err
	}
	if sys, ok := st.Sys().(*syscall.Stat_t); ok && sys.Nlink > 0 {
		return "", moving, nil
	}
	if len(files) == 0 {
		return "", newest, nil
	}
	return files[0], older, nil // thrown away: the oldest that is left follows it
}

// truncated begins anew in a log that was emptied in place.
func (r *reader) truncated(st os.FileInfo) (bool, error) {
	pos, err := r.f.Seek(0, io.SeekCurrent)
	if err != nil || st.Size() >= pos {
		return false, err
	}
	return true, r.open(r.path, 0)
}

// copyLog writes a log, and with Follow goes on until over is closed and everything is read.
func (s *Server) copyLog(ctx context.Context, path string, q agent.LogRequest, w io.Writer, over <-chan struct{}) error {
	p := &printer{w: w, q: q}
	var n *notifier
	if q.Follow {
		// Before the first look, so that nothing is missed between the two.
		var err error
		if n, err = s.watcher.watch(filepath.Dir(path)); err != nil {
			return err
		}
		defer n.close()
	}
	files, err := chain(path)
	if err != nil {
		return err
	}
	r := &reader{path: path}
	defer r.close()
	if len(files) > 0 {
		index, offset := 0, int64(0)
		if q.TailLines >= 0 {
			if index, offset, err = tailStart(files, q.TailLines); err != nil {
				return fmt.Errorf("reading log %s: %w", path, err)
			}
		} else {
			index = firstSince(files, q.Since)
		}
		if err := r.open(files[index], offset); err != nil {
			return fmt.Errorf("reading log %s: %w", path, err)
		}
	}
	err = r.copy(ctx, p, n, over)
	if errors.Is(err, errLimit) {
		return nil
	}
	return err
}

// firstSince passes over files that were written to for the last time before since.
func firstSince(files []string, since time.Time) int {
	for i, f := range files[:len(files)-1] {
		if st, err := os.Stat(f); err == nil && !st.ModTime().Before(since) {
			return i
		}
	}
	return len(files) - 1
}

func (r *reader) copy(ctx context.Context, p *printer, n *notifier, over <-chan struct{}) error {
	last := n == nil
	for {
		if r.f == nil {
			if err := r.open(r.path, 0); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return fmt.Errorf("reading log %s: %w", r.path, err)
			}
		}
		if r.f != nil {
			if err := r.drain(ctx, p.line); err != nil {
				return err
			}
			moved, err := r.advance(ctx, p.line)
			if err != nil {
				return err
			}
			if moved {
				continue
			}
		}
		if last {
			return r.rest(p)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-over:
			last = true // one more round: the last words were written before the end was told
		case _, ok := <-n.ch:
			last = !ok
		}
	}
}

// rest writes a last line that has no newline.
func (r *reader) rest(p *printer) error {
	if len(bytes.TrimSpace(r.held)) == 0 {
		return nil
	}
	return p.line(r.held)
}
