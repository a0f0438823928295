package image

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"keelson.dev/keelson/internal/durable"
	"keelson.dev/keelson/internal/reservedspace"
	"keelson.dev/keelson/internal/safepath"
)

// Removed is what MakeRoom did.
type Removed struct {
	Images int
	Bytes  int64 // that went with them, as unpacked
	// Short says that the file system is below its floor all the same. Lacking is what is missing up to where removing
	// ends; of bytes, 0 where it is inodes that are few.
	Short   bool
	Lacking int64
}

// MakeRoom removes images that nothing uses, the longest unused first, when the file system of the store is short, until
// there is some room again. An image is in use while a container stands on it, also one that has ended, while its name
// is among needed, and for some minutes after somebody has pulled it or asked for it. One whose archive lies in the
// folder of archives stays, for it would come back. Layers of pulls that are under way stay. What was removed is deleted
// when it returns, and so is what was removed before it began, unless deleting that takes long.
func (s *Store) MakeRoom(ctx context.Context, needed []string) (Removed, error) {
	if err := s.wait(ctx); err != nil {
		return Removed{}, err
	}
	stood := s.stoodOn()
	fs, err := s.fileSystem()
	if err != nil {
		return Removed{}, err
	}
	if s.lacks(fs) == (room{}) {
		return Removed{}, nil
	}
	// What goes already, layers of containers say, may be room enough.
	if err := s.deleting.wait(ctx); err != nil {
		return Removed{}, err
	}
	if fs, err = s.fileSystem(); err != nil {
		return Removed{}, err
	}
	want := s.lacks(fs)
	if want == (room{}) {
		return Removed{}, nil
	}
	done, err := s.removeUnused(needed, stood, want)
	if err != nil {
		return done, err
	}
	if fs, err = s.fileSystem(); err != nil {
		return done, err
	}
	done.Short, done.Lacking = s.pressed(fs), s.lacks(fs).bytes
	return done, nil
}

// lacks is how much has to be removed.
func (s *Store) lacks(fs fileSystem) room {
	want := fs.short(s.cfg.Floor)
	if s.cfg.Inodes != (reservedspace.Amount{}) {
		want.inodes = fs.inodes().short(s.cfg.Inodes).bytes
	}
	return want
}

// pressed says that less is free than has to be.
func (s *Store) pressed(fs fileSystem) bool {
	if s.cfg.Inodes == (reservedspace.Amount{}) {
		return fs.pressed(s.cfg.Floor)
	}
	return fs.bytes().pressed(s.cfg.Floor) || fs.inodes().pressed(s.cfg.Inodes)
}

// fileSystem looks at the one that the store is on.
func (s *Store) fileSystem() (fileSystem, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(s.cfg.Root, &st); err != nil {
		return fileSystem{}, fmt.Errorf("look at the room of the image store: %w", err)
	}
	return fileSystem{size: room{int64(st.Blocks) * st.Bsize, int64(st.Files)},
		free: room{int64(st.Bavail) * st.Bsize, int64(st.Ffree)}}, nil
}

// stoodOn are the ids of images on which containers stand. One that goes after the room was looked at frees some of it.
func (s *Store) stoodOn() map[string]bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := map[string]bool{}
	for _, c := range s.containers {
		out[c.Image] = true
	}
	return out
}

// removeUnused removes images until want is free, and none of stood. Who pulls or makes a container does so before or after it.
func (s *Store) removeUnused(needed []string, stood map[string]bool, want room) (Removed, error) {
	archived, err := s.archived()
	if err != nil {
		return Removed{}, err
	}
	sizes := s.layerSizes()
	var done Removed
	var aside []string
	setAside := func(path string) error {
		to, err := s.setAside(path)
		if to != "" {
			aside = append(aside, to)
		}
		return err
	}
	s.mu.Lock()
	v := s.inventory(needed, archived, sizes)
	maps.Copy(v.needed, stood)
	remove, freed := v.choose(want)
	var failed error
	for _, id := range remove {
		im := s.images[id]
		if failed = setAside(s.path("images", hexOf(id))); failed != nil {
			failed = fmt.Errorf("remove image %s: %w", id, failed)
			break
		}
		s.log.Info("image removed: the disk is short and nothing uses it", "image", id, "names", im.Names, "last used", im.used)
		delete(s.images, id)
		maps.DeleteFunc(s.names, func(_, of string) bool { return of == id })
		done.Images++
	}
	if err := s.collectTo(setAside); err != nil {
		failed = errors.Join(failed, fmt.Errorf("remove layers of images: %w", err))
	}
	s.mu.Unlock()
	for _, path := range aside {
		if err := safepath.RemoveAll(path); err != nil { // the next start tries again
			failed = errors.Join(failed, fmt.Errorf("delete what is left of a removed image: %w", err))
		}
	}
	if failed == nil {
		done.Bytes = freed.bytes
	}
	return done, failed
}

// inventory is what the store holds. The caller holds s.mu.
func (s *Store) inventory(needed []string, archived map[string]bool, sizes map[string]room) *inventory {
	v := &inventory{containers: slices.Collect(maps.Values(s.containers)), needed: map[string]bool{}, archived: archived,
		busy: map[string]bool{}, sizes: sizes}
	now := s.now()
	for _, im := range s.images {
		v.images = append(v.images, candidate{id: im.ID, layers: im.Layers, idle: now.Sub(im.used)})
	}
	for _, name := range needed {
		v.needed[s.lookup(name)] = true
	}
	for k := range s.busy {
		v.busy[k] = true
	}
	return v
}

// layerSizes reads what layers take; of one that cannot be read nothing is expected.
func (s *Store) layerSizes() map[string]room {
	out := map[string]room{}
	entries, _ := os.ReadDir(s.path("layers"))
	for _, e := range entries {
		var l layer
		if key, ok := strings.CutSuffix(e.Name(), ".json"); ok && durable.ReadJSON(s.path("layers", e.Name()), &l) == nil {
			out[key] = room{l.Bytes, l.Inodes}
		}
	}
	return out
}

// archived are the ids of images whose archives are in the folder of archives. One that nobody knows yet holds nothing
// that is here; the next start imports it.
func (s *Store) archived() (map[string]bool, error) {
	out := map[string]bool{}
	if s.cfg.Archives == "" {
		return out, nil
	}
	marks := map[string]archiveMark{}
	if err := durable.ReadJSON(s.path("archives.json"), &marks); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("read which images come from archives: %w", err)
	}
	for name, mark := range marks {
		if _, err := os.Stat(filepath.Join(s.cfg.Archives, name)); errors.Is(err, os.ErrNotExist) {
			continue // any other error: it may well be there
		}
		for id := range strings.SplitSeq(mark.IDs, ",") {
			out[id] = true
		}
	}
	return out, nil
}
