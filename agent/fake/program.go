package fake

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
)

// Program is an executable of this module that tests run as a separate process, as it runs on a
// node. It is built on first use.
type Program struct {
	Package string // path in the module

	once sync.Once
	dir  string
	err  error
}

// Path builds the program once and returns its path.
func (p *Program) Path() (string, error) {
	p.once.Do(p.buildOnce)
	return filepath.Join(p.dir, "program"), p.err
}

func (p *Program) buildOnce() {
	if p.dir, p.err = os.MkdirTemp("", "program"); p.err != nil {
		return
	}
	if out, err := exec.Command("go", "build", "-o", filepath.Join(p.dir, "program"), "keelson.dev/keelson/"+p.Package).
		CombinedOutput(); err != nil {
		p.err = fmt.Errorf("building %s: %w: %s", p.Package, err, out)
	}
}

// Remove deletes the built program.
func (p *Program) Remove() error {
	if p.dir == "" {
		return nil
	}
	return os.RemoveAll(p.dir)
}
