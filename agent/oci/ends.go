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

// An end file records on disk how a container exited. It exists until the container is removed.
// After a power failure, nothing else is left of the container, and a control plane that was
// unreachable does not know how it exited. The file has the shim's exit record (one line), and then
// the container data that the agent needs, without possible secrets.

// endFile returns the path of a container's end file. An empty id gives the directory of all end
// files.
func (l layout) endFile(id string) string { return filepath.Join(l.stateDir, "ended", id) }

// endNote returns the container data that the end file contains after the exit record. It omits the
// environment, the command and the mounts, except for parts that a start error quotes.
func endNote(rec containerRecord, config *cri.ContainerConfig) (string, error) {
	bare, err := proto.Marshal(&cri.ContainerConfig{Metadata: config.GetMetadata(), Image: config.GetImage(),
		Labels: config.GetLabels(), Annotations: config.GetAnnotations(), LogPath: config.GetLogPath()})
	if err != nil {
		return "", err
	}
	note, err := json.Marshal(&containerRecord{Version: recordVersion, ID: rec.ID, Sandbox: rec.Sandbox,
		State: ContainerExited, Config: bare, Created: rec.Created, ImageID: rec.ImageID, ImageRef: rec.ImageRef,
		Cgroup: rec.Cgroup, Log: rec.Log, StartError: rec.StartError})
	return string(note), err
}

// endText returns the content of an end file: the exit record, and text, the result of endNote.
func endText(exit exitRecord, text string) string {
	line := strconv.Itoa(int(exit.Code)) + " " + strconv.FormatInt(exit.Finished, 10) +
		" " + strconv.FormatInt(exit.Started, 10)
	if exit.OOM {
		line += " oom"
	}
	return line + "\n" + text
}

// loadEnds loads the exited containers of which only the end file is left. It removes an invalid
// file, which a power failure has truncated.
func (a adoption) loadEnds() error {
	entries, err := os.ReadDir(a.runtime.paths.endFile(""))
	if err != nil {
		return fmt.Errorf("read the exit records of containers: %w", err)
	}
	for _, entry := range entries {
		id := entry.Name()
		if _, ok := a.runtime.containers[id]; ok {
			continue
		}
		c, err := a.runtime.loadEnd(id)
		if isUnreadable(err) {
			return err
		}
		if err != nil {
			a.runtime.log.Warn("a container's exit record is invalid: removing it", "container", id, "error", err)
			if err := os.Remove(a.runtime.paths.endFile(id)); err != nil {
				return fmt.Errorf("remove an invalid record: %w", err)
			}
			continue
		}
		a.runtime.containers[id] = c
		a.runtime.names[containerName(c.rec.Sandbox, c.config.Metadata)] = id
	}
	return nil
}

func (r *Runtime) loadEnd(id string) (*container, error) {
	b, err := os.ReadFile(r.paths.endFile(id))
	if err != nil {
		return nil, err
	}
	line, note, _ := bytes.Cut(b, []byte{'\n'})
	c := &container{runtime: r, ended: make(chan struct{}), endOnly: true}
	if c.exit, err = parseExitRecord(line); err != nil {
		return nil, err
	}
	if err := json.Unmarshal(note, &c.rec); err != nil {
		return nil, err
	}
	if c.config, err = decodeContainerConfig(c.rec.Config); err != nil {
		return nil, err
	}
	if c.rec.ID != id || c.rec.Cgroup == "" || c.config.GetMetadata() == nil {
		return nil, errors.New("it belongs to another container")
	}
	c.rec.State, c.rec.Started = ContainerExited, c.exit.Started
	close(c.ended)
	return c, nil
}

// syncEndFiles makes the end files of exited containers durable until ctx ends. While it syncs,
// newly exited containers are queued and form the next batch.
func (r *Runtime) syncEndFiles(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-r.ends.queued:
		}
		r.mu.Lock()
		batch := r.ends.unsynced
		r.ends.unsynced = nil
		r.mu.Unlock()
		for _, c := range batch {
			if err := c.syncEndFile(); err != nil {
				r.log.Error("cannot sync the exit record of a container: it may not survive a power failure",
					"container", c.rec.ID, "error", err)
			}
		}
		if err := durable.Sync(r.paths.endFile("")); err != nil {
			r.log.Error("cannot sync the directory of exit records: they may not survive a power failure", "error", err)
		}
	}
}

// syncEndFile syncs the end file of a container. If the shim has not written the file, syncEndFile
// writes it: the shim may be of an earlier release, or it was killed.
func (c *container) syncEndFile() error {
	r := c.runtime
	path := r.paths.endFile(c.rec.ID)
	err := durable.Sync(path)
	if !errors.Is(err, fs.ErrNotExist) || c.exitUnknown.Load() {
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
	// The sync is between the rename and the check below. A removal that is in progress usually
	// ends meanwhile, and the check then finds it.
	err = durable.Write(path, []byte(endText(e, note)), durable.Atomic)
	if err == nil {
		err = durable.Sync(path)
	}
	if _, gone := r.findContainer(rec.ID); gone != nil {
		return errors.Join(err, ignoreMissing(os.Remove(path))) // the container was removed meanwhile
	}
	return err
}

// queueEndSync queues an exited container. syncEndFiles then makes the container's end file
// durable. The caller holds Runtime.mu.
func (c *container) queueEndSync() {
	r := c.runtime
	r.ends.unsynced = append(r.ends.unsynced, c)
	r.ends.queued.Send()
}
