package oci

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"

	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/internal/durable"
)

// How a container ended is also stored on disk until the container is removed. After a power
// failure nothing else is left of the container, and a control plane that was unreachable does not
// know its end. The file has the shim's record of the end (one line), then the container data that
// the agent needs, without possible secrets.

// endFile returns the file with the end of a container; an empty id gives the directory of all such
// files.
func (r *Runtime) endFile(id string) string { return filepath.Join(r.cfg.StateDir, "ended", id) }

// endNote returns the container data that is stored with its end. It omits the environment, the
// command and the mounts, except for parts that a start error quotes.
func endNote(rec containerRecord, config *cri.ContainerConfig) (string, error) {
	bare, err := proto.Marshal(&cri.ContainerConfig{Metadata: config.GetMetadata(), Image: config.GetImage(),
		Labels: config.GetLabels(), Annotations: config.GetAnnotations(), LogPath: config.GetLogPath()})
	if err != nil {
		return "", err
	}
	note, err := json.Marshal(&containerRecord{Version: recordVersion, ID: rec.ID, Sandbox: rec.Sandbox,
		State: ContainerExited, Config: bare, Created: rec.Created, ImageID: rec.ImageID, ImageRef: rec.ImageRef, Cgroup: rec.Cgroup, Log: rec.Log,
		StartError: rec.StartError})
	return string(note), err
}

// endText returns the content of an end file.
func endText(e exitRecord, note string) string {
	line := strconv.Itoa(int(e.Code)) + " " + strconv.FormatInt(e.Finished, 10) + " " + strconv.FormatInt(e.Started, 10)
	if e.OOM {
		line += " oom"
	}
	return line + "\n" + note
}

// loadEnds loads the containers of which only the end file is left. An invalid file was truncated
// by a power failure and is removed.
func (r *Runtime) loadEnds() error {
	entries, err := os.ReadDir(r.endFile(""))
	if err != nil {
		return fmt.Errorf("read the ends of containers: %w", err)
	}
	for _, entry := range entries {
		id := entry.Name()
		if _, ok := r.containers[id]; ok {
			continue
		}
		c, err := loadEnd(r.endFile(id), id)
		if unreadable(err) {
			return err
		}
		if err != nil {
			r.log.Warn("the record of a container's end is unusable and is removed", "container", id, "error", err)
			if err := os.Remove(r.endFile(id)); err != nil {
				return fmt.Errorf("remove an unusable record: %w", err)
			}
			continue
		}
		r.containers[id] = c
		r.names[containerName(c.rec.Sandbox, c.config.Metadata)] = id
	}
	return nil
}

func loadEnd(path, id string) (*ctr, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	line, note, _ := bytes.Cut(b, []byte{'\n'})
	c := &ctr{ended: make(chan struct{}), past: true}
	if c.exit, err = parseExit(line); err != nil {
		return nil, err
	}
	if err := json.Unmarshal(note, &c.rec); err != nil {
		return nil, err
	}
	if c.config, err = decodeContainerConfig(c.rec.Config); err != nil {
		return nil, err
	}
	if c.rec.ID != id || c.rec.Cgroup == "" || c.config.GetMetadata() == nil {
		return nil, errors.New("it is not of this container")
	}
	c.rec.State, c.rec.Started = ContainerExited, c.exit.Started
	close(c.ended)
	return c, nil
}

// keepEnds makes end files durable until ctx ends. It handles all containers that have ended
// meanwhile in one batch.
func (r *Runtime) keepEnds(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-r.endsWaiting:
		}
		r.mu.Lock()
		batch := r.ends
		r.ends = nil
		r.mu.Unlock()
		for _, c := range batch {
			if err := r.keepEnd(c); err != nil {
				r.log.Error("the end of a container does not outlive a power cut", "container", c.rec.ID, "error", err)
			}
		}
		if err := syncPath(r.endFile("")); err != nil {
			r.log.Error("ends of containers do not outlive a power cut", "error", err)
		}
	}
}

// keepEnd syncs the end file of a container. If the shim has not written it, keepEnd does: the shim
// may be of an earlier release or was killed.
func (r *Runtime) keepEnd(c *ctr) error {
	path := r.endFile(c.rec.ID)
	err := syncPath(path)
	if !errors.Is(err, fs.ErrNotExist) || c.lost.Load() {
		return err
	}
	r.mu.Lock()
	rec, e, known := c.rec, c.exit, r.containers[c.rec.ID] == c
	r.mu.Unlock()
	if !known {
		return nil
	}
	note, err := endNote(rec, c.config)
	if err != nil {
		return err
	}
	e.Started = rec.Started
	err = durable.Replace(path, []byte(endText(e, note)))
	if err == nil {
		err = syncPath(path)
	}
	if _, gone := r.container(rec.ID); gone != nil {
		return errors.Join(err, ignoreMissing(os.Remove(path))) // the container was removed meanwhile
	}
	return err
}

// endsSoon queues an ended container for keepEnds. The caller holds r.mu.
func (r *Runtime) endsSoon(c *ctr) {
	r.ends = append(r.ends, c)
	select {
	case r.endsWaiting <- struct{}{}:
	default:
	}
}

// syncPath syncs a file or directory.
func syncPath(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}
