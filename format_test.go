package keelson

import (
	"bytes"
	"go/format"
	"os"
	"os/exec"
	"path"
	"runtime"
	"strings"
	"sync"
	"testing"
)

// Every Go file is formatted as gofmt does it, so that a change shows nothing but what was changed. Files below testdata are what
// tests say they are.
func TestEveryFileIsFormatted(t *testing.T) {
	out, err := exec.Command("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--",
		"*.go").Output()
	if err != nil {
		t.Fatalf("git ls-files: %v", err)
	}
	files := make(chan string)
	var readers sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		readers.Go(func() {
			for file := range files {
				checkFormat(t, file)
			}
		})
	}
	seen, folders := 0, map[string]bool{}
	for file := range strings.SplitSeq(string(out), "\x00") {
		if file == "" || strings.Contains("/"+file, "/testdata/") {
			continue
		}
		seen++
		for dir := path.Dir(file); !folders[dir]; dir = path.Dir(dir) {
			folders[dir] = true
			if _, err := os.ReadDir(dir); err != nil && !os.IsNotExist(err) {
				// so that "go test" knows that its result is not that of other files
				t.Error(err)
			}
		}
		files <- file
	}
	close(files)
	readers.Wait()
	if seen == 0 {
		t.Fatal("git knows no Go file here")
	}
}

func checkFormat(t *testing.T, file string) {
	source, err := os.ReadFile(file)
	if os.IsNotExist(err) {
		return // removed, and git has not been told yet
	}
	if err != nil {
		t.Error(err)
		return
	}
	formatted, err := format.Source(source)
	if err != nil {
		t.Errorf("%s: %v", file, err)
		return
	}
	if !bytes.Equal(source, formatted) {
		t.Errorf("%s is not formatted: gofmt -w %[1]s", file)
	}
}
