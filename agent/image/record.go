package image

import (
	"encoding/json"
	"errors"
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

// image is what image.json holds, and the parsed config.
type image struct {
	ID     string   `json:"id"`
	Names  []string `json:"names"`  // normalised, tags and digests
	Layers []string `json:"layers"` // keys, base first
	Size   int64    `json:"size"`   // of the compressed layers and the config

	config *v1.ConfigFile
	used   time.Time // last, as far as known; on disk as the time of image.json
}

// layer is what KEY.json holds.
type layer struct {
	ChainID string `json:"chainID"`
	DiffID  string `json:"diffID"`
	Bytes   int64  `json:"bytes"` // unpacked
	Inodes  int64  `json:"inodes"`
}

// container is what records/ID holds.
type container struct {
	Image  string   `json:"image"`
	Layers []string `json:"layers"`
}

// layerKey names the folder of a layer. Mount options have room for one page, so
// it is short: 96 bits of the chain id.
func layerKey(chainID string) string {
	return strings.TrimPrefix(chainID, "sha256:")[:24]
}

func hexOf(id string) string { return strings.TrimPrefix(id, "sha256:") }

// load reads what is on disk and removes what nothing refers to. An image of which
// a layer is missing is dropped: it will be pulled again.
func (s *Store) load() error {
	entries, err := os.ReadDir(s.path("images"))
	if err != nil {
		return fmt.Errorf("read the image store: %w", err)
	}
	for _, e := range entries {
		im, err := s.loadImage(e.Name())
		if err != nil {
			s.log.Warn("an image of the store is unusable and is dropped", "image", e.Name(), "error", err)
			if err := safepath.RemoveAll(s.path("images", e.Name())); err != nil {
				return err
			}
			continue
		}
		s.images[im.ID] = im
		for _, n := range im.Names {
			s.names[n] = im.ID
		}
	}
	entries, err = os.ReadDir(s.path("containers"))
	if err != nil {
		return fmt.Errorf("read the image store: %w", err)
	}
	for _, e := range entries {
		var c container
		if err := durable.ReadJSON(s.containerRecord(e.Name()), &c); err != nil {
			if err := s.discard(s.path("containers", e.Name())); err != nil {
				return err
			}
			continue
		}
		s.containers[e.Name()] = c
	}
	entries, err = os.ReadDir(s.containerRecord(""))
	if err != nil {
		return fmt.Errorf("read the containers of the image store: %w", err)
	}
	for _, e := range entries {
		if _, known := s.containers[e.Name()]; !known {
			if err := os.Remove(s.containerRecord(e.Name())); err != nil {
				return err
			}
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.collect()
}

func (s *Store) loadImage(hex string) (*image, error) {
	im := &image{}
	if err := durable.ReadJSON(s.path("images", hex, "image.json"), im); err != nil {
		return nil, err
	}
	st, err := os.Stat(s.path("images", hex, "image.json"))
	if err != nil {
		return nil, err
	}
	im.used = st.ModTime()
	if hexOf(im.ID) != hex {
		return nil, fmt.Errorf("it is of %s", im.ID)
	}
	if err := durable.ReadJSON(s.path("images", hex, "config.json"), &im.config); err != nil {
		return nil, err
	}
	for _, k := range im.Layers {
		if _, err := os.Stat(s.path("layers", k)); err != nil {
			return nil, err
		}
	}
	return im, nil
}

// collect removes layers that no image, container or pull refers to. The caller
// holds s.mu.
func (s *Store) collect() error { return s.collectTo(s.discard) }

// collectTo has each layer that nothing refers to taken away by discard.
func (s *Store) collectTo(discard func(path string) error) error {
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
	entries, err := os.ReadDir(s.path("layers"))
	if err != nil {
		return fmt.Errorf("read the layers of the image store: %w", err)
	}
	for _, e := range entries {
		if key, _, _ := strings.Cut(e.Name(), "."); used[key] { // KEY, KEY.json, and KEY.json.new while that is written
			continue
		}
		if err := discard(s.path("layers", e.Name())); err != nil {
			return err
		}
	}
	return nil
}

// discard takes path away at once and deletes it in the background.
func (s *Store) discard(path string) error {
	to, err := s.setAside(path)
	if to == "" {
		return err
	}
	end := s.deleting.begin()
	s.trash.Go(func() {
		defer end()
		if err := safepath.RemoveAll(to); err != nil {
			s.log.Warn("scratch cannot be deleted; the next start tries again", "path", to, "error", err)
		}
	})
	return nil
}

// setAside takes path away at once, and says where it is to be deleted; "" = it was not there, or could not be moved.
func (s *Store) setAside(path string) (to string, err error) {
	// tmp is empty at start, so counting makes names that nobody has.
	to = s.path("tmp", fmt.Sprint("gone-", s.discarded.Add(1)))
	if err := os.Rename(path, to); errors.Is(err, os.ErrNotExist) {
		return "", nil
	} else if err != nil {
		return "", err
	}
	return to, nil
}

// use says that an image is in use now. The caller holds s.mu.
func (s *Store) use(im *image) {
	im.used = s.now()
	s.stamp(im)
}

// stamp writes down when an image was last used. The caller holds s.mu.
func (s *Store) stamp(im *image) {
	file := s.path("images", hexOf(im.ID), "image.json")
	if err := os.Chtimes(file, time.Time{}, im.used); err != nil { // until the agent ends the store knows it all the same
		s.log.Debug("the last use of an image is not written down", "image", im.ID, "error", err)
	}
}

// addNames gives an image more names. A name moves: whoever had it loses it. The
// caller holds s.mu.
func (s *Store) addNames(im *image, names ...string) error {
	changed := map[*image]bool{}
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
		if err := saveJSON(s.path("images", hexOf(c.ID), "image.json"), c); err != nil {
			return err
		}
		s.stamp(c) // a name that comes or goes is no use
	}
	return nil
}

// saveJSON writes a file whole or not at all, also across a power cut.
func saveJSON(path string, v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return saveFile(path, data)
}

func saveFile(path string, data []byte) error {
	f, err := os.OpenFile(path+".new", os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err == nil {
		err = f.Sync()
	}
	if e := f.Close(); err == nil {
		err = e
	}
	if err == nil {
		err = os.Rename(path+".new", path)
	}
	if err != nil {
		return fmt.Errorf("save %s: %w", path, err)
	}
	return nil
}

// syncTree makes everything in a folder's file system durable.
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

func saveContainer(path string, c container) error {
	data, err := json.Marshal(c)
	if err != nil {
		return err
	}
	return durable.Replace(path, data)
}
