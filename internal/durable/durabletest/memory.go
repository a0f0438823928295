package durabletest

import (
	"bytes"
	"os"

	"keelson.dev/keelson/internal/durable"
)

// Memory is a file system in memory: it maps the name of each file to its content. Open does not
// create files. It is not safe for concurrent use.
type Memory map[string][]byte

type memFile struct {
	files Memory
	name  string
}

// Open implements durable.FS.
func (m Memory) Open(name string, _ int) (durable.File, error) {
	if _, ok := m[name]; !ok {
		return nil, os.ErrNotExist
	}
	return memFile{m, name}, nil
}

func (f memFile) ReadAt(p []byte, off int64) (int, error) {
	return bytes.NewReader(f.files[f.name]).ReadAt(p, off)
}

func (f memFile) WriteAt(p []byte, off int64) (int, error) {
	b := f.files[f.name]
	if grow := off + int64(len(p)) - int64(len(b)); grow > 0 {
		b = append(b, make([]byte, grow)...)
	}
	f.files[f.name] = b
	return copy(b[off:], p), nil
}

func (f memFile) Sync() error          { return nil }
func (f memFile) Close() error         { return nil }
func (f memFile) Size() (int64, error) { return int64(len(f.files[f.name])), nil }
