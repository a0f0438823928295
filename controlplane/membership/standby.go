package membership

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"time"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/clusterhttp"
	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/raftstore"
)

// A standby is a member without a vote. The file standby.json in the data directory distinguishes a
// standby from a joining voter, which also has no vote until it has caught up. The file exists
// until the replica has a vote.

// clearStandby deletes standby.json once this replica has a vote. If the replica loses its data
// later, it then joins again as a voter.
func (r *Membership) clearStandby() {
	if !r.standby.Load() || !hasVote(r.store.Status().Members, r.config.Dir.Name, r.store.Ready()) {
		return
	}
	if err := os.Remove(filepath.Join(r.config.Dir.Path, datadir.StandbyFile)); err != nil &&
		!errors.Is(err, fs.ErrNotExist) {
		r.config.Log.Warn("this replica has a vote, but the file that marks it as a standby cannot be deleted", "err",
			err)
		return
	}
	r.standby.Store(false)
	r.config.Log.Info("this standby has received a vote")
}

// hasVote reports whether the replica with the given name has a vote according to members. caughtUp
// reports whether members is current: if it is not, hasVote returns false, because an old list may
// contain a previous voter of the same name.
func hasVote(members []raftstore.Member, name string, caughtUp bool) bool {
	return caughtUp && slices.ContainsFunc(members, func(m raftstore.Member) bool { return m.ID == name && m.Voter })
}

// FindMember returns the member with the given name from the committed raft configuration. If there
// is no such member, the error has the HTTP status 404. The error contains the time and the reason
// of the member's removal, if they are recorded.
func (r *Membership) FindMember(ctx context.Context, name string) (raftstore.Member, error) {
	if _, err := r.store.Sync(ctx); err != nil {
		return raftstore.Member{}, err
	}
	for _, m := range r.store.Status().Members {
		if m.ID == name {
			return m, nil
		}
	}
	rec, _, err := readRemovedMembers(ctx, r.store)
	if err != nil {
		return raftstore.Member{}, err
	}
	err = fmt.Errorf("replica %s is not a member of the raft cluster", name)
	for _, m := range slices.Backward(rec.Members) {
		if m.Name != name {
			continue
		}
		at, because := time.UnixMilli(m.RemovedAt).UTC().Format(time.RFC3339), ""
		if m.Reason != "" {
			because = ": " + m.Reason
		}
		err = fmt.Errorf("replica %s was removed from the raft cluster at %s%s", name, at, because)
		break
	}
	return raftstore.Member{}, clusterhttp.Refuse(http.StatusNotFound, err)
}

const (
	removalInterval = 2 * time.Second // interval at which a replica that is not ready checks whether it was removed
	maxMemberBytes  = 64 << 10        // maximum size of the response to this check, in bytes
)

// WatchRemoval checks periodically whether this replica was removed from the cluster, while its own
// store is not ready. It sends requests to the other replicas: if a replica was removed while it
// was stopped, its own list of members still contains it, and the other replicas refuse its raft
// connections. CheckMember returns the result. WatchRemoval returns when ctx ends.
func (r *Membership) WatchRemoval(ctx context.Context) error {
	for {
		if err := wait.Delay(ctx, removalInterval); err != nil {
			return err
		}
		if r.store.Ready() {
			if r.removalReason.Swap(nil) != nil {
				r.config.Log.Info("this replica is a member again")
			}
			continue
		}
		if joining, err := r.peersToJoin(); err != nil || len(joining) > 0 {
			continue
		}
		reason := r.findRemovalReason(ctx)
		if reason == "" {
			continue
		}
		message := fmt.Sprintf("%s. It is no longer a member: stop it, move %s aside, and join its machine to the "+
			"cluster again", reason,
			r.config.Dir.Path)
		if previous := r.removalReason.Swap(&message); previous == nil || *previous != message {
			r.config.Log.Error("this replica is no longer a member", "reason", message)
		}
	}
}

// findRemovalReason sends requests to the last known members, one after another, until one responds
// that this replica was removed. It returns the message of that response, or "".
func (r *Membership) findRemovalReason(ctx context.Context) string {
	members, err := r.config.Dir.Members()
	if err != nil {
		return ""
	}
	for name, address := range members {
		if name == r.config.Dir.Name {
			continue
		}
		if reason := fetchRemovalReason(ctx, r.peers, r.config.Dir.Name, address); reason != "" {
			return reason
		}
	}
	return ""
}

// fetchRemovalReason requests the member with the given name from the replica at peerAddress. If
// that replica responds that there is no such member, the result is its message, which contains the
// reason of the removal. Otherwise the result is "".
func fetchRemovalReason(ctx context.Context, peers *Peers, name, peerAddress string) string {
	ctx, cancel := context.WithTimeout(ctx, clusterhttp.StatusTimeout)
	defer cancel()
	resp, err := peers.SendRequest(ctx, http.MethodGet, peerAddress,
		api.PathClusterMembers+"/"+url.PathEscape(name), nil)
	if err != nil {
		return ""
	}
	defer resp.Body.Close()
	var s struct{ Message string }
	if resp.StatusCode != http.StatusNotFound ||
		json.NewDecoder(io.LimitReader(resp.Body, maxMemberBytes)).Decode(&s) != nil {
		return "" // the replica is a member, or the response is not valid
	}
	return s.Message
}
