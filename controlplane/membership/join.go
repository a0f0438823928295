package membership

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
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
	"keelson.dev/keelson/controlplane/api/clusterhttp"
	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/internal/backoff"
	"keelson.dev/keelson/internal/wait"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// changeTimeout is the timeout of a request by which another replica adds or removes a member.
const changeTimeout = 30 * time.Second

// membersInterval is the interval at which RecordMembers checks the list of members.
const membersInterval = 500 * time.Millisecond

// EnrollReplica returns what a joining replica needs: the CAs, keys and secrets of the cluster, its
// configuration and the list of replicas. The caller has verified the join token. The joining
// replica requests membership later, when its own peer port is open.
func (r *Membership) EnrollReplica(_ context.Context, req *fleetv1.EnrollReplicaRequest) (
	*fleetv1.EnrollReplicaResponse, error,
) {
	isMember := false
	for _, m := range r.store.Status().Members {
		host, _, _ := net.SplitHostPort(m.Address)
		if m.ID == req.GetName() && host != req.GetPeerAddress() {
			return nil, status.Errorf(codes.AlreadyExists,
				"replica %q is already a member at %s: give the joining replica another --name, or remove the "+
					"existing member first",
				m.ID, m.Address)
		}
		isMember = isMember || m.ID == req.GetName()
	}
	if ip, err := netip.ParseAddr(req.GetPeerAddress()); err == nil && !isMember {
		// a current member with such an address may keep it
		if rangeDescription, _ := r.config.Cluster.RangeOf(ip); rangeDescription != "" {
			return nil, status.Errorf(codes.InvalidArgument,
				"--advertise-address %s: give the machine another address, because the ranges of a cluster cannot "+
					"be changed", rangeDescription)
		}
	}
	if current := r.level.applied.Load(); req.GetFeatureLevel() < current {
		return nil, status.Errorf(codes.InvalidArgument,
			"the cluster stores forms of feature level %d and the release of replica %q "+
				"supports levels up to %d: install the release of the other replicas on its machine", current,
			req.GetName(), req.GetFeatureLevel())
	}
	trust, err := r.keys.LoadTrust() // it contains the keys of finished rotations
	if err != nil {
		return nil, err
	}
	bundle, err := trust.Marshal()
	if err != nil {
		return nil, err
	}
	cluster, err := json.Marshal(r.config.Cluster)
	if err != nil {
		return nil, err
	}
	list, _ := r.peers.ListReplicas()
	if len(list) == 0 { // before the first probes: return at least this replica
		list = []*fleetv1.Replica{{Name: r.config.Dir.Name,
			ApiAddress:   datadir.HostPort(r.config.Dir.Advertise, r.config.Cluster.APIPort),
			FleetAddress: datadir.HostPort(r.config.Dir.Advertise, r.config.Cluster.FleetPort)}}
	}
	return &fleetv1.EnrollReplicaResponse{
		Files: map[string][]byte{trustBundleName: bundle}, Replicas: list, ClusterConfigJson: string(cluster),
	}, nil
}

// leaveCluster removes the old member with this replica's name from the cluster, if this replica
// joins without data. It runs before the store starts. The old member may have voted and
// acknowledged log entries, which its lost data contained. It must not be part of a quorum until
// the replica has joined again and has caught up.
func (r *Membership) leaveCluster(ctx context.Context) error {
	peers, err := r.peersToJoin()
	if err != nil || len(peers) == 0 {
		return err
	}
	switch hasData, err := r.config.Dir.HasRaftData(); {
	case err != nil:
		return err
	case hasData: // the replica has joined before and has the data of its member
		return nil
	}
	return callUntilDone(ctx, r.config.Log, peers, "removing the previous member of this name before joining",
		func(ctx context.Context, peer string) error {
			resp, err := r.peers.SendRequest(ctx, http.MethodDelete, peer,
				api.PathClusterMembers+"/"+url.PathEscape(r.config.Dir.Name), nil)
			if err != nil {
				return err
			}
			defer resp.Body.Close()
			switch resp.StatusCode {
			case http.StatusOK:
				r.config.Log.Info("the previous member of this name was removed; this replica can join", "peer", peer)
				return nil
			case http.StatusNotFound: // there is no member of this name
				return nil
			}
			return clusterhttp.ReadError(resp)
		})
}

// BecomeMember requests membership from the replicas in peers.json, a file that Join has written.
// It repeats the request until one of these replicas has added this replica as a member. Without
// that file it sends no request, because this replica is already a member or created the cluster.
// It then blocks until ctx ends.
func (r *Membership) BecomeMember(ctx context.Context) error {
	peers, err := r.peersToJoin()
	if err != nil {
		return err
	}
	select {
	case <-r.leaveDone:
	case <-ctx.Done():
		return ctx.Err()
	}
	if len(peers) > 0 {
		if err := r.recordPeers(peers); err != nil {
			return err
		}
		body, err := json.Marshal(api.ClusterJoin{Name: r.config.Dir.Name,
			Address: datadir.HostPort(r.config.Dir.Advertise, r.config.Cluster.PeerPort), Standby: r.standby.Load()})
		if err != nil {
			return err
		}
		err = callUntilDone(ctx, r.config.Log, peers, "requesting membership",
			func(ctx context.Context, peer string) error {
				if err := r.keys.CompareWithPeer(ctx, peer); err != nil {
					return err
				}
				resp, err := r.peers.SendRequest(ctx, http.MethodPost, peer, api.PathClusterMembers, body)
				if err != nil {
					return err
				}
				defer resp.Body.Close()
				switch resp.StatusCode {
				case http.StatusOK:
				case http.StatusPreconditionFailed:
					return fmt.Errorf("%w: %w", datadir.ErrLevelTooHigh, clusterhttp.ReadError(resp))
				default:
					return clusterhttp.ReadError(resp)
				}
				r.config.Log.Info("this replica is a member of the raft cluster", "peer", peer)
				return nil
			})
		if err != nil {
			return err
		}
		if err := os.Rename(filepath.Join(r.config.Dir.Path, datadir.PeersFile),
			filepath.Join(r.config.Dir.Path, datadir.NewMemberFile)); err != nil {
			return err
		}
	}
	<-ctx.Done()
	return ctx.Err()
}

// recordPeers writes the replicas in peers and this replica to members.json, unless the file
// already lists members. If this replica loses its data immediately after it became a member, the
// file still contains the addresses of the other members.
func (r *Membership) recordPeers(peers map[string]string) error {
	if known, err := r.config.Dir.Members(); err != nil || len(known) > 0 {
		return err
	}
	known := maps.Clone(peers)
	known[r.config.Dir.Name] = datadir.HostPort(r.config.Dir.Advertise, r.config.Cluster.PeerPort)
	return datadir.WriteJSON(filepath.Join(r.config.Dir.Path, datadir.MembersFile), known)
}

// peersToJoin returns the replicas from which this replica requests membership: their peer
// addresses by their names. It reads them from peers.json. The result is empty if this replica is
// already a member.
func (r *Membership) peersToJoin() (map[string]string, error) {
	var peers map[string]string
	_, err := datadir.ReadJSON(filepath.Join(r.config.Dir.Path, datadir.PeersFile), &peers)
	delete(peers, r.config.Dir.Name)
	return peers, err
}

// clearJoining deletes datadir.NewMemberFile once this replica has caught up with the leader. That
// file marks a replica that became a member and has not caught up yet.
func (r *Membership) clearJoining() {
	if !r.joining || !r.store.Ready() {
		return
	}
	if joining, err := r.peersToJoin(); err != nil || len(joining) > 0 {
		return // it will request membership again
	}
	if err := os.Remove(filepath.Join(r.config.Dir.Path, datadir.NewMemberFile)); err != nil &&
		!errors.Is(err, fs.ErrNotExist) {
		r.config.Log.Warn("this replica has caught up, but the file that marks it as joining cannot be deleted", "err",
			err)
		return
	}
	r.joining = false
}

// callUntilDone runs call for each of peers in turn, repeatedly, until a call succeeds or ctx ends.
// It stops early if a replica responds that this release is too old for the cluster
// (datadir.ErrLevelTooHigh). peers maps names to addresses, and action describes the call in log
// messages.
func callUntilDone(
	ctx context.Context, log *slog.Logger, peers map[string]string, action string,
	call func(ctx context.Context, peer string) error,
) error {
	retry := backoff.Backoff{Min: 100 * time.Millisecond, Max: 2 * time.Second, Jitter: 0.3}
	for {
		var errs []error
		for name, address := range peers {
			attempt, cancel := context.WithTimeout(ctx, changeTimeout)
			err := call(attempt, address)
			cancel()
			if err == nil || errors.Is(err, datadir.ErrLevelTooHigh) {
				return err
			}
			errs = append(errs, fmt.Errorf("%s: %w", name, err))
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		log.Warn(action, "err", errors.Join(errs...))
		if err := wait.Delay(ctx, retry.Next()); err != nil {
			return err
		}
	}
}

// RecordMembers writes the list of members to members.json whenever the list changes. If this
// replica loses its raft log, it finds the addresses of the other members in this file.
// RecordMembers also closes the connections of removed members. It returns when ctx ends.
func (r *Membership) RecordMembers(ctx context.Context) error {
	written, err := r.config.Dir.Members()
	if err != nil {
		r.config.Log.Warn("cannot read the recorded list of members", "err", err)
	}
	for {
		current := map[string]string{}
		for _, m := range r.store.Status().Members {
			current[m.ID] = m.Address
		}
		r.clearStandby()
		r.clearJoining()
		// A list without this replica is out of date: this replica is still catching up.
		if _, selfIsMember := current[r.config.Dir.Name]; selfIsMember && !maps.Equal(current, written) {
			if err := datadir.WriteJSON(filepath.Join(r.config.Dir.Path, datadir.MembersFile), current); err != nil {
				return fmt.Errorf("recording the list of members: %w", err)
			}
			written = current
		}
		r.authorizer.closeRemoved()
		if ctx.Err() != nil {
			return ctx.Err()
		}
		_ = wait.Delay(ctx, membersInterval) // after the end of ctx, the list is checked a last time
	}
}
