package image

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sys/unix"

	"keelson.dev/keelson/internal/durable"
	"keelson.dev/keelson/internal/safepath"
)

// imageRecord is an image in the store: the content of its image.json, and its parsed config.
type imageRecord struct {
	ID     string   `json:"id"`
	Names  []string `json:"names"`  // normalized, tags and digests
	Layers []string `json:"layers"` // layer keys, base first
	Size   int64    `json:"size"`   // bytes of the compressed layers and the config

	config   *v1.ConfigFile
	lastUsed time.Time // last known use; stored on disk as the modification time of image.json
}

// layerRecord is the JSON content of layers/KEY.json, the record of an unpacked layer.
type layerRecord struct {
	ChainID string `json:"chainID"`
	DiffID  string `json:"diffID"`
	Bytes   int64  `json:"bytes"` // unpacked
	Inodes  int64  `json:"inodes"`
}

// containerRecord is the JSON content of records/ID: the image and the layers of a container.
type containerRecord struct {
	Image  string   `json:"image"`
	Layers []string `json:"layers"`
}

// layerKey returns the folder name of a layer: 96 bits of the chain ID. It is short because mount
// options are limited to one page.
func layerKey(chainID string) string {
	return strings.TrimPrefix(chainID, "sha256:")[:24]
}

func hexOf(id string) string { return strings.TrimPrefix(id, "sha256:") }

// loadStore reads the images, layers and container records from disk, and deletes unreferenced
// data. An image with a missing layer is dropped and will be pulled again.
func (s *Store) loadStore() error {
	entries, err := os.ReadDir(s.storePath("images"))
	if err != nil {
		return fmt.Errorf("read the image store: %w", err)
	}
	for _, e := range entries {
		im, err := s.loadImage(e.Name())
		if err != nil {
			s.log.Warn("dropping an unusable image of the store", "image", e.Name(), "error", err)
			if err := safepath.RemoveAll(s.storePath("images", e.Name())); err != nil {
				return err
			}
			continue
		}
		s.images[im.ID] = im
		for _, n := range im.Names {
			s.names[n] = im.ID
		}
	}
	entries, err = os.ReadDir(s.storePath("containers"))
	if err != nil {
		return fmt.Errorf("read the image store: %w", err)
	}
	for _, e := range entries {
		var c containerRecord
		if err := durable.ReadJSON(s.containerRecordPath(e.Name()), &c); err != nil {
			if err := s.trash.deleteInBackground(s.storePath("containers", e.Name())); err != nil {
				return err
			}
			continue
		}
		s.containers[e.Name()] = c
	}
	entries, err = os.ReadDir(s.containerRecordPath(""))
	if err != nil {
		return fmt.Errorf("read the containers of the image store: %w", err)
	}
	for _, e := range entries {
		if _, known := s.containers[e.Name()]; !known {
			if err := os.Remove(s.containerRecordPath(e.Name())); err != nil {
				return err
			}
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.removeUnusedLayers()
}

func (s *Store) loadImage(hex string) (*imageRecord, error) {
	im := &imageRecord{}
	if err := durable.ReadJSON(s.storePath("images", hex, "image.json"), im); err != nil {
		return nil, err
	}
	st, err := os.Stat(s.storePath("images", hex, "image.json"))
	if err != nil {
		return nil, err
	}
	im.lastUsed = st.ModTime()
	if hexOf(im.ID) != hex {
		return nil, fmt.Errorf("image.json belongs to image %s", im.ID)
	}
	if err := durable.ReadJSON(s.storePath("images", hex, "config.json"), &im.config); err != nil {
		return nil, err
	}
	for _, k := range im.Layers {
		if _, err := os.Stat(s.storePath("layers", k)); err != nil {
			return nil, err
		}
	}
	return im, nil
}

// removeUnusedLayers deletes in the background the layers that no image, container or pull uses.
// The caller holds s.mu.
func (s *Store) removeUnusedLayers() error {
	return s.removeUnusedLayersWith(s.trash.deleteInBackground)
}

// removeUnusedLayersWith calls discard for the path of each layer that no image, container or pull
// uses, and of its record. The caller holds s.mu.
func (s *Store) removeUnusedLayersWith(discard func(path string) error) error {
	used := map[string]bool{}
	for _, im := range s.images {
		for _, k := range im.Layers {
			used[k] = true
		}
	}
	for _, c := range s.containers {
		for _, k := range c.Layers {
			used[k] = true
		}
	}
	for k := range s.busy {
		used[k] = true
	}
	entries, err := os.ReadDir(s.storePath("layers"))
	if err != nil {
		return fmt.Errorf("read the layers of the image store: %w", err)
	}
	for _, e := range entries {
		if key, _, _ := strings.Cut(e.Name(), "."); used[key] { // KEY, KEY.json, and the temporary KEY.json.new
			continue
		}
		if err := discard(s.storePath("layers", e.Name())); err != nil {
			return err
		}
	}
	return nil
}

// markUsed sets the time of the last use of an image to now. The caller holds s.mu.
func (s *Store) markUsed(im *imageRecord) {
	im.lastUsed = s.now()
	s.storeLastUse(im)
}

// storeLastUse writes the time of the last use of an image to disk. The caller holds s.mu.
func (s *Store) storeLastUse(im *imageRecord) {
	file := s.storePath("images", hexOf(im.ID), "image.json")
	if err := os.Chtimes(file, time.Time{}, im.lastUsed); err != nil {
		// the time in memory remains valid until the agent stops
		s.log.Debug("the last use of an image could not be stored", "image", im.ID, "error", err)
	}
}

// addNames adds names to an image and writes the changed images to disk. A name that another image
// has is removed from that image. The caller holds s.mu.
func (s *Store) addNames(im *imageRecord, names ...string) error {
	changed := map[*imageRecord]bool{}
	for _, n := range names {
		if old := s.images[s.names[n]]; old != nil && old != im {
			old.Names = slices.DeleteFunc(old.Names, func(have string) bool { return have == n })
			changed[old] = true
		}
		if !slices.Contains(im.Names, n) {
			im.Names = append(im.Names, n)
			changed[im] = true
		}
		s.names[n] = im.ID
	}
	for c := range changed {
		slices.Sort(c.Names)
		if err := saveJSON(s.storePath("images", hexOf(c.ID), "image.json"), c); err != nil {
			return err
		}
		s.storeLastUse(c) // a change of names is not a use
	}
	return nil
}

// saveJSON writes v as JSON to the file at path, atomically and durably.
func saveJSON(path string, v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return saveFile(path, data)
}

// saveFile writes the file at path atomically. Its content survives a power failure.
func saveFile(path string, data []byte) error {
	if err := durable.Write(path, data, durable.Intact); err != nil {
		return fmt.Errorf("save %s: %w", path, err)
	}
	return nil
}

// syncTree flushes the file system that contains a folder to disk (syncfs).
func syncTree(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.Syncfs(int(f.Fd())); err != nil {
		return fmt.Errorf("sync %s: %w", dir, err)
	}
	return nil
}

func saveContainer(path string, c containerRecord) error {
	data, err := json.Marshal(c)
	if err != nil {
		return err
	}
	return durable.Write(path, data, durable.Atomic)
}
