package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/internal/backoff"
	"keelson.dev/keelson/internal/wait"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
	"keelson.dev/keelson/raftstore"
)

// membersEvery is how often a replica looks at the list of members.
const membersEvery = 500 * time.Millisecond

type raftMember = raftstore.Member

// enrollReplica hands the cluster's trust to a newcomer whose token was checked.
// It asks for membership itself once it runs: then its listener is there.
func (r *Replica) enrollReplica(_ context.Context, req *fleetv1.EnrollReplicaRequest) (*fleetv1.EnrollReplicaResponse, error) {
	known := false
	for _, m := range r.store.Status().Members {
		host, _, _ := net.SplitHostPort(m.Address)
		if m.ID == req.GetName() && host != req.GetPeerAddress() {
			return nil, status.Errorf(codes.AlreadyExists, "replica %q is a member at %s: give the newcomer another --name, or remove the old one first", m.ID, m.Address)
		}
		known = known || m.ID == req.GetName()
	}
	if ip, err := netip.ParseAddr(req.GetPeerAddress()); err == nil && !known { // a member of such an address goes on
		if said, _ := r.cluster.RangeOf(ip); said != "" {
			return nil, status.Errorf(codes.InvalidArgument, "--advertise-address %s: give the machine another address, for the ranges of a cluster stay", said)
		}
	}
	if stored := r.level.seen.Load(); req.GetFeatureLevel() < stored {
		return nil, status.Errorf(codes.InvalidArgument, "the cluster stores forms of feature level %d and the release of replica %q "+
			"understands levels up to %d: install the release of the other replicas on its machine", stored, req.GetName(), req.GetFeatureLevel())
	}
	trust, err := r.keys.load() // as it is now: a key may have been exchanged
	if err != nil {
		return nil, err
	}
	bundle, err := trust.Marshal()
	if err != nil {
		return nil, err
	}
	cluster, err := json.Marshal(r.cluster)
	if err != nil {
		return nil, err
	}
	list, _ := r.peers.List()
	if len(list) == 0 { // before the first round: at least ourselves
		list = []*fleetv1.Replica{{Name: r.cfg.Name, ApiAddress: datadir.HostPort(r.cfg.Advertise, r.cluster.APIPort), FleetAddress: datadir.HostPort(r.cfg.Advertise, r.cluster.FleetPort)}}
	}
	return &fleetv1.EnrollReplicaResponse{
		Files: map[string][]byte{bundleName: bundle}, Replicas: list, ClusterConfigJson: string(cluster),
	}, nil
}

// leaveFirst runs before the store of a replica that is to become a member and
// has no data. The group may know it from a time when it had some: then it has
// voted and acknowledged entries that it knows nothing of now, and must not
// count until it was taken out and has everything again. For a name that the
// group does not know there is nothing to do.
func (r *Replica) leaveFirst(ctx context.Context) error {
	peers, err := r.toBecomeMember()
	if err != nil || len(peers) == 0 {
		return err
	}
	switch has, err := r.cfg.Dir().HasRaftData(); {
	case err != nil:
		return err
	case has: // it had begun to take part when it was stopped
		return nil
	}
	return r.askUntilDone(ctx, peers, "leaving the group before joining it anew", func(ctx context.Context, peer string) error {
		resp, err := r.call(ctx, http.MethodDelete, peer, api.PathClusterMembers+"/"+url.PathEscape(r.cfg.Name), nil)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		switch resp.StatusCode {
		case http.StatusOK:
			r.log.Info("the group has forgotten this replica, to take it in anew", "asked", peer)
			return nil
		case http.StatusNotFound: // nobody knows it
			return nil
		}
		return refusal(resp)
	})
}

// becomeMember asks the replicas that were there at joining to take this one into
// the group, until one has. A founder, and a replica that was taken in before, has nothing to do.
func (r *Replica) becomeMember(ctx context.Context) error {
	peers, err := r.toBecomeMember()
	if err != nil {
		return err
	}
	select {
	case <-r.left:
	case <-ctx.Done():
		return ctx.Err()
	}
	if len(peers) > 0 {
		if err := r.knowBefore(peers); err != nil {
			return err
		}
		body, err := json.Marshal(api.ClusterJoin{Name: r.cfg.Name, Address: datadir.HostPort(r.cfg.Advertise, r.cluster.PeerPort), Standby: r.standby.Load()})
		if err != nil {
			return err
		}
		err = r.askUntilDone(ctx, peers, "asking for membership", func(ctx context.Context, peer string) error {
			why, known := r.staleBefore(ctx, peer)
			if known {
				r.noteStale(why)
			}
			if why != "" {
				return errors.New(why)
			}
			resp, err := r.call(ctx, http.MethodPost, peer, api.PathClusterMembers, body)
			if err != nil {
				return err
			}
			defer resp.Body.Close()
			switch resp.StatusCode {
			case http.StatusOK:
			case http.StatusPreconditionFailed:
				return fmt.Errorf("%w: %w", datadir.ErrLevelTooHigh, refusal(resp))
			default:
				return refusal(resp)
			}
			r.log.Info("this replica is a member of the group", "asked", peer)
			return nil
		})
		if err != nil {
			return err
		}
		if err := os.Rename(filepath.Join(r.cfg.DataDir, datadir.PeersFile), filepath.Join(r.cfg.DataDir, datadir.NewcomerFile)); err != nil {
			return err
		}
	}
	<-ctx.Done()
	return ctx.Err()
}

// knowBefore writes down whom this replica asks as the members that it knows, if it
// knows of none: should it lose its data right after it was taken in, it will know
// who has it.
func (r *Replica) knowBefore(peers map[string]string) error {
	if known, err := r.cfg.Dir().Members(); err != nil || len(known) > 0 {
		return err
	}
	known := maps.Clone(peers)
	known[r.cfg.Name] = datadir.HostPort(r.cfg.Advertise, r.cluster.PeerPort)
	return datadir.WriteJSON(filepath.Join(r.cfg.DataDir, datadir.MembersFile), known)
}

// toBecomeMember are the replicas to ask, by name; none for one that is a member.
func (r *Replica) toBecomeMember() (map[string]string, error) {
	var peers map[string]string
	_, err := datadir.ReadJSON(filepath.Join(r.cfg.DataDir, datadir.PeersFile), &peers)
	delete(peers, r.cfg.Name)
	return peers, err
}

// noteCaughtUp forgets that this replica is a newcomer once it has all that the group has.
func (r *Replica) noteCaughtUp() {
	if !r.newcomer || !r.store.Ready() {
		return
	}
	if joining, err := r.toBecomeMember(); err != nil || len(joining) > 0 {
		return // it was one before, and asks to be one again
	}
	if err := os.Remove(filepath.Join(r.cfg.DataDir, datadir.NewcomerFile)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		r.log.Warn("this replica has all that the group has and cannot forget that it is a newcomer", "err", err)
		return
	}
	r.newcomer = false
}

// askUntilDone asks one replica after the other until one has done it.
func (r *Replica) askUntilDone(ctx context.Context, peers map[string]string, what string, ask func(ctx context.Context, peer string) error) error {
	retry := backoff.Backoff{Min: 100 * time.Millisecond, Max: 2 * time.Second, Jitter: 0.3}
	for {
		var errs []error
		for name, address := range peers {
			attempt, cancel := context.WithTimeout(ctx, changeTimeout)
			err := ask(attempt, address)
			cancel()
			if err == nil || errors.Is(err, datadir.ErrLevelTooHigh) {
				return err
			}
			errs = append(errs, fmt.Errorf("%s: %w", name, err))
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		r.log.Warn(what, "err", errors.Join(errs...))
		if err := wait.Delay(ctx, retry.Next()); err != nil {
			return err
		}
	}
}

// keepMembers writes down who is a member whenever that changes, for the day on
// which this replica has to be rebuilt and its log cannot be asked; and has the
// gate look who is none any more.
func (r *Replica) keepMembers(ctx context.Context) error {
	written, err := r.cfg.Dir().Members()
	if err != nil {
		r.log.Warn("reading the members of last time", "err", err)
	}
	for {
		now := map[string]string{}
		for _, m := range r.store.Status().Members {
			now[m.ID] = m.Address
		}
		r.noteVote()
		r.noteCaughtUp()
		// Only a list that this replica is on tells whom to ask.
		if _, mine := now[r.cfg.Name]; mine && !maps.Equal(now, written) {
			if err := datadir.WriteJSON(filepath.Join(r.cfg.DataDir, datadir.MembersFile), now); err != nil {
				return fmt.Errorf("keeping the list of members: %w", err)
			}
			written = now
		}
		r.gate.sweep()
		if ctx.Err() != nil {
			return ctx.Err()
		}
		_ = wait.Delay(ctx, membersEvery) // when ctx ends, one last look
	}
}
