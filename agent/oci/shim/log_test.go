package shim

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// parseLog is the reader that the writer is checked against: it joins parts.
func parseLog(t *testing.T, log []byte) (stdout, stderr string) {
	t.Helper()
	var out [2]strings.Builder
	for _, line := range bytes.SplitAfter(log, []byte("\n")) {
		if len(line) == 0 {
			continue
		}
		f := bytes.SplitN(line, []byte(" "), 4)
		if len(f) != 4 {
			t.Fatalf("line %q has %d fields", line, len(f))
		}
		if _, err := time.Parse(time.RFC3339Nano, string(f[0])); err != nil {
			t.Fatalf("line %q: %v", line, err)
		}
		i := 0
		switch string(f[1]) {
		case "stdout":
		case "stderr":
			i = 1
		default:
			t.Fatalf("line %q: stream", line)
		}
		switch string(f[2]) {
		case "F":
			out[i].Write(f[3])
		case "P":
			out[i].Write(bytes.TrimSuffix(f[3], []byte("\n")))
		default:
			t.Fatalf("line %q: tag", line)
		}
	}
	return out[0].String(), out[1].String()
}

// FuzzLog writes output in pieces of any size and reads it back.
func FuzzLog(f *testing.F) {
	f.Add([]byte("one\ntwo\nthree"), uint16(3))
	f.Add([]byte("\n\n"), uint16(1))
	f.Add(bytes.Repeat([]byte("x"), 3*maxLine+5), uint16(1000))
	f.Fuzz(func(t *testing.T, in []byte, step uint16) {
		var held [2][]byte
		var log []byte
		stamp := appendTime(nil, 1e18)
		for rest := in; len(rest) > 0; {
			n := min(int(step)+1, len(rest))
			log = appendLines(log, stamp, 0, &held[0], rest[:n])
			if len(held[0]) > maxLine {
				t.Fatalf("%d bytes are held back", len(held[0]))
			}
			rest = rest[n:]
		}
		want := string(in)
		if len(held[0]) > 0 { // as flush does
			log = appendLine(log, stamp, 0, 'P', held[0], nil)
		}
		if got, _ := parseLog(t, log); got != want {
			t.Fatalf("wrote %q, read %q", want, got)
		}
	})
}

func TestTimeIsTheLibrarys(t *testing.T) {
	for _, s := range []string{"1970-01-01T00:00:00.000000000Z", "2000-02-29T23:59:59.999999999Z",
		"2024-12-31T12:00:00.000000001Z", "2100-03-01T00:00:00.5Z", "2026-11-20T13:04:05.123456789Z"} {
		at, err := time.Parse(time.RFC3339Nano, s)
		if err != nil {
			t.Fatal(err)
		}
		got := string(appendTime(nil, at.UnixNano()))
		if want := at.Format("2006-01-02T15:04:05.000000000Z"); got != want || len(got) != 30 {
			t.Errorf("%s became %s", want, got)
		}
	}
	// Every day of four centuries has its name.
	for day := int64(0); day < 146097; day++ {
		at := time.Unix(day*86400, 0).UTC()
		if got, want := string(appendTime(nil, at.UnixNano())),
			at.Format("2006-01-02T15:04:05.000000000Z"); got != want && at.Year() < 2262 {
			t.Fatalf("%s became %s", want, got)
		}
	}
}

func TestRotationKeepsTheNewest(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	f := logFile{path: path, fd: -1, limit: 200, files: 3}
	if err := f.reopenFile(); err != nil {
		t.Fatal(err)
	}
	defer f.closeFile()
	for i := range 20 {
		f.logOutput(0, fmt.Appendf(nil, "line %d\n", i))
	}
	files, _ := filepath.Glob(path + "*")
	if len(files) != 3 {
		t.Errorf("files: %v", files)
	}
	var all []byte
	for _, name := range []string{path + ".2", path + ".1", path} {
		b, err := os.ReadFile(name)
		if err != nil || len(b) > 200 {
			t.Errorf("%s has %d bytes, %v", name, len(b), err)
		}
		all = append(all, b...)
	}
	out, _ := parseLog(t, all)
	if !strings.HasSuffix(out, "line 17\nline 18\nline 19\n") {
		t.Errorf("the newest lines are missing: %q", out)
	}
}

// A last line without a newline is a part, as CRI has it: a reader gets the very bytes that were written.
func TestLastLineWithoutNewline(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	f := logFile{path: path, fd: -1}
	if err := f.reopenFile(); err != nil {
		t.Fatal(err)
	}
	defer f.closeFile()
	f.logOutput(0, []byte("whole\nno newl"))
	f.logOutput(0, []byte("ine"))
	f.logOutput(1, []byte("error\n"))
	f.flushPartialLine(0)
	f.flushPartialLine(1)
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if out, errs := parseLog(t, b); out != "whole\nno newline" || errs != "error\n" ||
		!strings.HasSuffix(string(b), " stdout P no newline\n") {
		t.Errorf("logged %q", b)
	}
}

// On a full disk a log loses lines, but it stays whole and within its bounds, and goes on when there is room.
func TestLogOnAFullDisk(t *testing.T) {
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=65536"); err != nil {
		t.Skip("needs root: ", err)
	}
	t.Cleanup(func() { _ = syscall.Unmount(dir, 0) })
	filler := filepath.Join(dir, "filler")
	if err := os.WriteFile(filler, make([]byte, 48<<10), 0o600); err != nil {
		t.Fatal(err)
	}
	const limit, files = 12 << 10, 3
	path := filepath.Join(dir, "log")
	f := logFile{path: path, fd: -1, limit: limit, files: files}
	if err := f.reopenFile(); err != nil {
		t.Fatal(err)
	}
	defer f.closeFile()
	write := func(from, to int) {
		for i := from; i < to; i++ {
			f.logOutput(0, fmt.Appendf(nil, "line %d %s\n", i, strings.Repeat("x", 700)))
		}
	}
	check := func() (text string) {
		names, err := filepath.Glob(path + "*")
		if err != nil || len(names) > files {
			t.Fatalf("files: %v, %v", names, err)
		}
		for _, name := range names {
			b, err := os.ReadFile(name)
			if err != nil || len(b) > limit || len(b) > 0 && b[len(b)-1] != '\n' {
				t.Fatalf("%s has %d bytes, the last is not the end of a line, or %v", name, len(b), err)
			}
			out, _ := parseLog(t, b)
			text += out
		}
		return text
	}
	write(0, 200)
	check()
	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	write(200, 300)
	if text := check(); !strings.Contains(text, "line 299 ") {
		t.Errorf("the log does not go on once there is room")
	}
	// A folder that is gone takes no new file either.
	if err := os.Rename(path, path+".1"); err != nil {
		t.Fatal(err)
	}
	f.path = filepath.Join(dir, "gone", "log")
	write(0, 100)
	var st syscall.Stat_t
	if err := syscall.Fstat(f.fd, &st); err != nil || st.Size > limit {
		t.Errorf("a log that cannot be rotated has %d bytes, %v", st.Size, err)
	}
}

// A log is written to a file of its own: not to what others put in its place, in a folder that they can write to.
func TestLogIsAFileOfItsOwn(t *testing.T) {
	dir := t.TempDir()
	precious := filepath.Join(dir, "precious")
	for _, err := range []error{os.WriteFile(precious, []byte("kept"), 0o600), os.Symlink(precious, dir+"/link"),
		os.Symlink(dir+"/new", dir+"/dangling"),
		os.Link(precious, dir+"/second"), syscall.Mkfifo(dir+"/fifo", 0o600)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"link", "dangling", "second", "fifo"} {
		f := &logFile{path: filepath.Join(dir, name), fd: -1}
		if err := f.reopenFile(); err == nil || !strings.Contains(err.Error(), "open log") {
			t.Errorf("%s: %v", name, err)
		}
		f.logOutput(0, []byte("line\n"))
		f.closeFile()
	}
	b, err := os.ReadFile(precious)
	if err != nil || string(b) != "kept" {
		t.Errorf("%q, %v", b, err)
	}
	if _, err := os.Lstat(dir + "/new"); err == nil {
		t.Error("a file was made where a link leads")
	}
	// The same for the next file of a rotation.
	f := &logFile{path: filepath.Join(dir, "log"), fd: -1, limit: 50, files: 2}
	if err := f.reopenFile(); err != nil {
		t.Fatal(err)
	}
	defer f.closeFile()
	for _, plant := range []func(string, string) error{os.Symlink, os.Link} {
		if err := plant(precious, dir+"/log.next"); err != nil {
			t.Fatal(err)
		}
		for range 3 {
			f.logOutput(0, []byte("a line of some length\n"))
		}
	}
	if b, err := os.ReadFile(precious); err != nil || string(b) != "kept" {
		t.Errorf("after a rotation: %q, %v", b, err)
	}
}

func TestOOMCount(t *testing.T) {
	for text, want := range map[string]int{
		"oom_kill_disable 0\nunder_oom 0\noom_kill 3\n":             3,
		"low 0\nhigh 0\nmax 5\noom 1\noom_kill 1\noom_group_kill 0": 1,
		"oom_kill 0": 0, "": 0, "oom_kill": 0, "oom_kill x": 0,
	} {
		if got := oomCount([]byte(text)); got != want {
			t.Errorf("%q counts %d, want %d", text, got, want)
		}
	}
}

func TestAnswers(t *testing.T) {
	if pid, text, err := parseAnswer("12\n{}"); pid != 12 || text != "{}" || err != nil {
		t.Error(pid, text, err)
	}
	for in, want := range map[string]string{"": "without a response", "0\nno such file": "no such file",
		"panic: oops\nmore": "panic: oops", "-4\nx": "unexpected output"} {
		if _, _, err := parseAnswer(in); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v", in, err)
		}
	}
}
