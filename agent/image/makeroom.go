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

	"keelson.dev/keelson/internal/durable"
	"keelson.dev/keelson/internal/safepath"
)

// Removed is the result of MakeRoom: what was removed, and how much space is still missing.
type Removed struct {
	Images int
	Bytes  int64 // unpacked bytes of the removed layers
	// Short reports whether the file system is still below its floor. Lacking is the number of
	// bytes that are missing to the target free space; 0 if only inodes are missing.
	Short   bool
	Lacking int64
}

// MakeRoom removes unused images, least recently used first, if little space is free on the file
// system of the store. It stops when enough space is free.
//
// An image counts as used while a running or exited container uses it, while needed contains its
// name, and for minIdle after its last use. An image of an archive in the archives folder stays,
// because it would be imported again. The layers of running pulls stay too.
//
// When MakeRoom returns, the removed data is deleted from disk. So is data that was removed
// earlier, unless its deletion takes longer than deletionTimeout.
func (s *Store) MakeRoom(ctx context.Context, needed []string) (Removed, error) {
	if err := s.awaitReady(ctx); err != nil {
		return Removed{}, err
	}
	stood := s.imagesOfContainers()
	fs, err := s.space.statFileSystem()
	if err != nil {
		return Removed{}, err
	}
	if s.space.missingSpace(fs) == (diskSpace{}) {
		return Removed{}, nil
	}
	// Deletions that are already running may free enough, for example layers of containers.
	if err := s.trash.deleting.awaitCurrent(ctx); err != nil {
		return Removed{}, err
	}
	if fs, err = s.space.statFileSystem(); err != nil {
		return Removed{}, err
	}
	want := s.space.missingSpace(fs)
	if want == (diskSpace{}) {
		return Removed{}, nil
	}
	done, err := s.removeUnused(needed, stood, want)
	if err != nil {
		return done, err
	}
	if fs, err = s.space.statFileSystem(); err != nil {
		return done, err
	}
	done.Short, done.Lacking = s.space.isBelowFloor(fs), s.space.missingSpace(fs).bytes
	return done, nil
}

// imagesOfContainers returns the IDs of the images that containers use. MakeRoom keeps these images
// even if their containers are removed while it runs, because such a removal frees space by itself.
func (s *Store) imagesOfContainers() map[string]bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := map[string]bool{}
	for _, c := range s.containers {
		out[c.Image] = true
	}
	return out
}

// removeUnused removes unused images until the required space is freed. It keeps containerImages,
// the images that containers used when the space was measured. Concurrent pulls and creations of
// containers wait.
func (s *Store) removeUnused(needed []string, containerImages map[string]bool, required diskSpace) (Removed, error) {
	archived, err := s.archivedImages()
	if err != nil {
		return Removed{}, err
	}
	sizes := s.layers.layerSizes()
	var done Removed
	var aside []string
	setAside := func(path string) error {
		to, err := s.trash.moveToTrash(path)
		if to != "" {
			aside = append(aside, to)
		}
		return err
	}
	s.mu.Lock()
	v := s.currentInventory(needed, archived, sizes)
	maps.Copy(v.needed, containerImages)
	remove, freed := v.chooseImages(required)
	var failed error
	for _, id := range remove {
		im := s.images[id]
		if failed = setAside(s.storePath("images", hexOf(id))); failed != nil {
			failed = fmt.Errorf("remove image %s: %w", id, failed)
			break
		}
		s.log.Info("removed an unused image because the disk is low on space", "image", id, "names", im.Names,
			"last used", im.lastUsed)
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

// currentInventory returns the inventory of the store, from which images to remove are chosen.
// needed are the names of the images of the node's pods. The caller holds s.mu.
func (s *Store) currentInventory(needed []string, archived map[string]bool, sizes map[string]diskSpace) *inventory {
	v := &inventory{containers: slices.Collect(maps.Values(s.containers)), needed: map[string]bool{},
		archived: archived,
		busy:     map[string]bool{}, sizes: sizes}
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

// archivedImages returns the IDs of the images of those archives that are still in Config.Archives.
// A new archive has no mark and is not included; the next start imports it.
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
