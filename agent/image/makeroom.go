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

// Removed is the result of MakeRoom.
type Removed struct {
	Images int
	Bytes  int64 // unpacked bytes of the removed layers
	// Short reports whether the file system is still below its floor. Lacking is the number of
	// bytes missing to the target; 0 if only inodes are missing.
	Short   bool
	Lacking int64
}

// MakeRoom removes unused images, least recently used first, if the file system of the store is low
// on space. It stops when enough space is free.
//
// An image is in use while a container uses it, also an exited one, while its name is in needed,
// and for minIdle after its last use. An image with an archive in the archives folder stays,
// because it would be imported again. Layers of running pulls stay.
//
// The removed data is deleted when MakeRoom returns. So is data that was removed earlier, unless
// its deletion takes longer than deletionTimeout.
func (s *Store) MakeRoom(ctx context.Context, needed []string) (Removed, error) {
	if err := s.awaitReady(ctx); err != nil {
		return Removed{}, err
	}
	stood := s.imagesOfContainers()
	fs, err := s.statFileSystem()
	if err != nil {
		return Removed{}, err
	}
	if s.missingSpace(fs) == (diskSpace{}) {
		return Removed{}, nil
	}
	// Deletions that are already running may free enough, for example layers of containers.
	if err := s.deleting.awaitCurrent(ctx); err != nil {
		return Removed{}, err
	}
	if fs, err = s.statFileSystem(); err != nil {
		return Removed{}, err
	}
	want := s.missingSpace(fs)
	if want == (diskSpace{}) {
		return Removed{}, nil
	}
	done, err := s.removeUnused(needed, stood, want)
	if err != nil {
		return done, err
	}
	if fs, err = s.statFileSystem(); err != nil {
		return done, err
	}
	done.Short, done.Lacking = s.isBelowFloor(fs), s.missingSpace(fs).bytes
	return done, nil
}

// missingSpace returns how much space must be removed from the file system fs to reach the target
// above the floors of bytes and inodes.
func (s *Store) missingSpace(fs fileSystem) diskSpace {
	want := fs.missingSpace(s.cfg.Floor)
	if s.cfg.Inodes != (reservedspace.Amount{}) {
		want.inodes = fs.inodesAsBytes().missingSpace(s.cfg.Inodes).bytes
	}
	return want
}

// isBelowFloor reports whether the file system fs has fewer free bytes or inodes than the
// configured floors.
func (s *Store) isBelowFloor(fs fileSystem) bool {
	if s.cfg.Inodes == (reservedspace.Amount{}) {
		return fs.isBelowFloor(s.cfg.Floor)
	}
	return fs.withoutInodes().isBelowFloor(s.cfg.Floor) || fs.inodesAsBytes().isBelowFloor(s.cfg.Inodes)
}

// statFileSystem returns the size and the free space of the file system that contains the store.
func (s *Store) statFileSystem() (fileSystem, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(s.cfg.Root, &st); err != nil {
		return fileSystem{}, fmt.Errorf("read the free space of the image store: %w", err)
	}
	return fileSystem{size: diskSpace{int64(st.Blocks) * st.Bsize, int64(st.Files)},
		free: diskSpace{int64(st.Bavail) * st.Bsize, int64(st.Ffree)}}, nil
}

// imagesOfContainers returns the IDs of images that containers use. A container that is removed
// after the space was measured frees space by itself.
func (s *Store) imagesOfContainers() map[string]bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := map[string]bool{}
	for _, c := range s.containers {
		out[c.Image] = true
	}
	return out
}

// removeUnused removes unused images until the space want is freed. It keeps the images in stood,
// which containers used when the space was measured. Concurrent pulls and creations of containers
// wait.
func (s *Store) removeUnused(needed []string, stood map[string]bool, want diskSpace) (Removed, error) {
	archived, err := s.archivedImages()
	if err != nil {
		return Removed{}, err
	}
	sizes := s.layerSizes()
	var done Removed
	var aside []string
	setAside := func(path string) error {
		to, err := s.moveToTrash(path)
		if to != "" {
			aside = append(aside, to)
		}
		return err
	}
	s.mu.Lock()
	v := s.currentInventory(needed, archived, sizes)
	maps.Copy(v.needed, stood)
	remove, freed := v.chooseImages(want)
	var failed error
	for _, id := range remove {
		im := s.images[id]
		if failed = setAside(s.storePath("images", hexOf(id))); failed != nil {
			failed = fmt.Errorf("remove image %s: %w", id, failed)
			break
		}
		s.log.Info("removed an unused image because the disk is low on space", "image", id, "names", im.Names, "last used", im.lastUsed)
		delete(s.images, id)
		maps.DeleteFunc(s.names, func(_, of string) bool { return of == id })
		done.Images++
	}
	if err := s.removeUnusedLayersWith(setAside); err != nil {
		failed = errors.Join(failed, fmt.Errorf("remove layers of images: %w", err))
	}
	s.mu.Unlock()
	for _, path := range aside {
		if err := safepath.RemoveAll(path); err != nil { // the next start retries
			failed = errors.Join(failed, fmt.Errorf("delete data of a removed image: %w", err))
		}
	}
	if failed == nil {
		done.Bytes = freed.bytes
	}
	return done, failed
}

// currentInventory returns the inventory of the store for choosing images to remove. The caller
// holds s.mu.
func (s *Store) currentInventory(needed []string, archived map[string]bool, sizes map[string]diskSpace) *inventory {
	v := &inventory{containers: slices.Collect(maps.Values(s.containers)), needed: map[string]bool{}, archived: archived,
		busy: map[string]bool{}, sizes: sizes}
	now := s.now()
	for _, im := range s.images {
		v.images = append(v.images, removalCandidate{id: im.ID, layers: im.Layers, idle: now.Sub(im.lastUsed)})
	}
	for _, name := range needed {
		v.needed[s.lookupID(name)] = true
	}
	for k := range s.busy {
		v.busy[k] = true
	}
	return v
}

// layerSizes returns the size of each unpacked layer by its key. It omits a layer with an
// unreadable record, which then counts as 0.
func (s *Store) layerSizes() map[string]diskSpace {
	out := map[string]diskSpace{}
	entries, _ := os.ReadDir(s.storePath("layers"))
	for _, e := range entries {
		var l layerRecord
		if key, ok := strings.CutSuffix(e.Name(), ".json"); ok && durable.ReadJSON(s.storePath("layers", e.Name()), &l) == nil {
			out[key] = diskSpace{l.Bytes, l.Inodes}
		}
	}
	return out
}

// archivedImages returns the IDs of images from archives that are still in Config.Archives. A new
// archive has no mark; the next start imports it.
func (s *Store) archivedImages() (map[string]bool, error) {
	out := map[string]bool{}
	if s.cfg.Archives == "" {
		return out, nil
	}
	marks := map[string]archiveMark{}
	if err := durable.ReadJSON(s.storePath("archives.json"), &marks); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("read the list of imported archives: %w", err)
	}
	for name, mark := range marks {
		if _, err := os.Stat(filepath.Join(s.cfg.Archives, name)); errors.Is(err, os.ErrNotExist) {
			continue // with any other error, the archive may exist
		}
		for id := range strings.SplitSeq(mark.IDs, ",") {
			out[id] = true
		}
	}
	return out, nil
}
