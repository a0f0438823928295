package fake

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
)

// Program is a program of the project that tests run as a process of its own, as on a node. It is built when it is asked
// for first.
type Program struct {
	Package string // below the module

	once sync.Once
	dir  string
	err  error
}

// Path builds the program once, and says where it is.
func (p *Program) Path() (string, error) {
	p.once.Do(p.build)
	return filepath.Join(p.dir, "program"), p.err
}

func (p *Program) build() {
	if p.dir, p.err = os.MkdirTemp("", "program"); p.err != nil {
		return
	}
	if out, err := exec.Command("go", "build", "-o", filepath.Join(p.dir, "program"), "keelson.dev/keelson/"+p.Package).CombinedOutput(); err != nil {
		p.err = fmt.Errorf("building %s: %w: %s", p.Package, err, out)
	}
}

// Remove takes away what was built.
func (p *Program) Remove() error {
	if p.dir == "" {
		return nil
	}
	return os.RemoveAll(p.dir)
}
