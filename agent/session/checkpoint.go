package session

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"google.golang.org/protobuf/encoding/protodelim"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/internal/durable"
	"keelson.dev/keelson/internal/wait"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// Files of the checkpoint. A checkpoint contains the messages of a session on disk: Welcome, the
// full assignment, and Synced. Each message is preceded by its length. Secrets are in a separate
// file in the run folder, which a reboot empties.
const (
	checkpointFile  = "assignment.checkpoint"
	secretsFile     = "secrets.checkpoint"
	peersPerMessage = 1000 // peers per message of a checkpoint
)

// runCheckpoints writes the checkpoint of the view to disk whenever the view has changed, until ctx
// ends. The time between two checkpoints is at least Config.CheckpointEvery. If changes are not yet
// written when ctx ends, it writes a last checkpoint.
func (s *Session) runCheckpoints(ctx context.Context) error {
	changes := s.Changes(ctx)
	for {
		select {
		case <-changes:
		case <-ctx.Done():
			return ctx.Err()
		}
		if !s.hasAssignment() {
			continue
		}
		began := time.Now()
		if err := s.writeCheckpoint(); err != nil {
			s.log.Error("the checkpoint could not be written: a restart without a control plane would restore an "+
				"older state", "err", err)
		}
		// On a large cluster that changes constantly, writing checkpoints takes at most 5 % of the
		// time.
		pause := max(s.cfg.CheckpointEvery, 20*time.Since(began))
		if err := wait.Delay(ctx, pause); err != nil {
			if werr := s.writeCheckpoint(); werr != nil {
				s.log.Error("the last checkpoint could not be written", "err", werr)
			}
			return err
		}
	}
}

func (s *Session) hasAssignment() bool {
	select {
	case <-s.view.synced:
		return true
	default:
		return false
	}
}

func (s *Session) writeCheckpoint() error {
	s.view.mu.RLock()
	var plain, secret []storedObject
	kindOf := make(map[wireObject]string)
	for kind, objs := range s.view.current.byKind {
		for _, h := range objs {
			kindOf[h.object] = kind
			if kind == "Secret" {
				secret = append(secret, h)
			} else {
				plain = append(plain, h)
			}
		}
	}
	peers := slices.Collect(maps.Values(s.view.current.peers))
	c, revision := s.view.cluster, s.view.revision
	s.view.mu.RUnlock()

	welcome := &fleetv1.Welcome{ClusterName: c.Name, PodCidr: c.PodCIDR, ClusterCidr: c.ClusterCIDR,
		ServiceCidr: c.ServiceCIDR, ClusterDomain: c.Domain,
		PodCidrs: c.PodCIDRs, ClusterCidrs: c.ClusterCIDRs, ServiceCidrs: c.ServiceCIDRs}
	if err := writeRecording(filepath.Join(s.cfg.StateDir, checkpointFile), welcome, plain, kindOf, peers,
		revision); err != nil {
		return err
	}
	return writeRecording(filepath.Join(s.cfg.RunDir, secretsFile), welcome, secret, kindOf, nil, revision)
}

func writeRecording(
	path string, welcome *fleetv1.Welcome, objs []storedObject, kindOf map[wireObject]string, peers []*storedPeer,
	revision uint64,
) error {
	var b bytes.Buffer
	put := func(m *fleetv1.ControlMessage) error {
		_, err := protodelim.MarshalTo(&b, m)
		return err
	}
	if err := put(&fleetv1.ControlMessage{Kind: &fleetv1.ControlMessage_Welcome{Welcome: welcome}}); err != nil {
		return fmt.Errorf("checkpoint %s: %w", path, err)
	}
	for _, h := range objs {
		kind := kindOf[h.object]
		raw, err := encodeObject(kind, h.object)
		if err != nil {
			return fmt.Errorf("checkpoint %s: %w", path, err)
		}
		o := &fleetv1.Object{Kind: kind, Namespace: h.object.GetNamespace(), Name: h.object.GetName(),
			Revision: h.revision, Raw: raw}
		set := &fleetv1.ObjectSet{Full: true, Upserts: []*fleetv1.Object{o}}
		if err := put(&fleetv1.ControlMessage{Kind: &fleetv1.ControlMessage_Objects{Objects: set}}); err != nil {
			return fmt.Errorf("checkpoint %s: %w", path, err)
		}
	}
	for part := range slices.Chunk(peers, peersPerMessage) {
		set := &fleetv1.ObjectSet{Full: true}
		for _, h := range part {
			set.Peers = append(set.Peers, h.peerMessage())
		}
		if err := put(&fleetv1.ControlMessage{Kind: &fleetv1.ControlMessage_Objects{Objects: set}}); err != nil {
			return fmt.Errorf("checkpoint %s: %w", path, err)
		}
	}
	synced := &fleetv1.ControlMessage{Kind: &fleetv1.ControlMessage_Synced{Synced: &fleetv1.Synced{Revision: revision}}}
	if err := put(synced); err != nil {
		return fmt.Errorf("checkpoint %s: %w", path, err)
	}
	return writeFile(path, b.Bytes())
}

// loadCheckpoint replaces the view with the checkpoint on disk. It returns nil if no checkpoint
// exists. The caller can ignore an error, because the next session delivers every object again.
func (s *Session) loadCheckpoint() error {
	msgs, err := readRecording(filepath.Join(s.cfg.StateDir, checkpointFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	secrets, err := readRecording(filepath.Join(s.cfg.RunDir, secretsFile))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		s.log.Warn("the checkpoint of secrets is unusable", "err", err)
	}
	var (
		cluster  agent.Cluster
		revision uint64
	)
	for _, m := range append(secrets, msgs...) {
		switch k := m.Kind.(type) {
		case *fleetv1.ControlMessage_Welcome:
			cluster = clusterFromWelcome(k.Welcome)
		case *fleetv1.ControlMessage_Objects:
			if err := s.view.applyObjects(k.Objects); err != nil {
				s.view.discardIncoming()
				return fmt.Errorf("checkpoint: %w", err)
			}
		case *fleetv1.ControlMessage_Synced:
			revision = k.Synced.Revision
		}
	}
	if err := s.loadStatuses(); err != nil {
		s.log.Warn("the stored pod statuses are unusable: using those of the control plane", "err", err)
	}
	s.view.setCluster(cluster)
	s.view.completeBatch(revision, true)
	return nil
}

// readRecording reads the messages of a checkpoint file. It returns an error if the file is
// incomplete, that is, if the final message Synced is missing.
func readRecording(path string) ([]*fleetv1.ControlMessage, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var (
		msgs []*fleetv1.ControlMessage
		r    = bufio.NewReader(f)
		opts = protodelim.UnmarshalOptions{MaxSize: maxMessage}
	)
	for {
		m := &fleetv1.ControlMessage{}
		if err := opts.UnmarshalFrom(r, m); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return nil, fmt.Errorf("read %s: %w", path, err)
		}
		msgs = append(msgs, m)
	}
	if len(msgs) == 0 || msgs[len(msgs)-1].GetSynced() == nil {
		return nil, fmt.Errorf("read %s: the file is truncated: the last message is not Synced", path)
	}
	return msgs, nil
}

// writeFile replaces the file at path with data, atomically and durably. Only root can read the
// file.
func writeFile(path string, data []byte) error {
	o := durable.Options{Level: durable.Persistent, TempPattern: "." + filepath.Base(path) + "-"}
	if err := durable.WriteWith(path, data, o); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}

func clusterFromWelcome(w *fleetv1.Welcome) agent.Cluster {
	return agent.Cluster{Name: w.ClusterName, PodCIDR: w.PodCidr, ClusterCIDR: w.ClusterCidr,
		ServiceCIDR: w.ServiceCidr, Domain: w.ClusterDomain,
		PodCIDRs: w.PodCidrs, ClusterCIDRs: w.ClusterCidrs, ServiceCIDRs: w.ServiceCidrs}
}
