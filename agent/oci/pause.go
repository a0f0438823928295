package oci

import (
	"errors"
	"os"
	"path/filepath"

	"keelson.dev/keelson/internal/durable"
)

// installPause copies the pause binary into root, its future root directory. It keeps an identical
// binary, because running pause processes use it.
func installPause(source, root string) error {
	program, err := os.ReadFile(source)
	if err != nil {
		return err
	}
	target := filepath.Join(root, pauseProgram)
	if existing, err := os.ReadFile(target); err == nil && string(existing) == string(program) {
		return nil
	}
	if err := os.Chmod(root, 0o755); err != nil {
		return err
	}
	staged, err := durable.Create(target, durable.Options{Level: durable.Atomic, Mode: 0o555})
	if err != nil {
		return err
	}
	_, err = staged.Write(program)
	if err == nil {
		err = staged.Chmod(0o555) // regardless of the umask
	}
	if err != nil {
		return errors.Join(err, staged.Discard())
	}
	return staged.Commit()
}

const pauseProgram = "/keelson-pause"
