package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/internal/backoff"
	"keelson.dev/keelson/internal/wait"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore"
)

type raftMember = raftstore.Member

// enrollReplica hands the cluster's trust to a newcomer whose token was checked.
// It asks for membership itself once it runs: then its listener is there.
func (r *Replica) enrollReplica(_ context.Context, req *fleetv1.EnrollReplicaRequest) (*fleetv1.EnrollReplicaResponse, error) {
	for _, m := range r.store.Status().Members {
		host, _, _ := net.SplitHostPort(m.Address)
		if m.ID == req.GetName() && host != req.GetPeerAddress() {
			return nil, status.Errorf(codes.AlreadyExists, "replica %q is a member at %s: give the newcomer another --name, or remove the old one first", m.ID, m.Address)
		}
	}
	bundle, err := r.trust.Marshal()
	if err != nil {
		return nil, err
	}
	cluster, err := json.Marshal(r.cluster)
	if err != nil {
		return nil, err
	}
	list, _ := r.peers.List()
	if len(list) == 0 { // before the first round: at least ourselves
		list = []*fleetv1.Replica{{Name: r.cfg.Name, ApiAddress: at(r.cfg.Advertise, r.cluster.APIPort), FleetAddress: at(r.cfg.Advertise, r.cluster.FleetPort)}}
	}
	r.log.Info("replica enrolled", "replica", req.GetName(), "address", req.GetPeerAddress())
	return &fleetv1.EnrollReplicaResponse{
		Files: map[string][]byte{bundleName: bundle}, Replicas: list, ClusterConfigJson: string(cluster),
	}, nil
}

// becomeMember asks the replicas that were there at joining to take this one into
// the group, until one has. A founder, and a replica that was taken in before, has nothing to do.
func (r *Replica) becomeMember(ctx context.Context) error {
	path := filepath.Join(r.cfg.DataDir, peersFile)
	var peers map[string]string
	found, err := readJSON(path, &peers)
	if err != nil {
		return err
	}
	if found {
		if err := r.askForMembership(ctx, peers); err != nil {
			return err
		}
		if err := os.Remove(path); err != nil {
			return err
		}
	}
	<-ctx.Done()
	return ctx.Err()
}

func (r *Replica) askForMembership(ctx context.Context, peers map[string]string) error {
	retry := backoff.Backoff{Min: 100 * time.Millisecond, Max: 2 * time.Second, Jitter: 0.3}
	for {
		var errs []error
		for name, address := range peers {
			err := r.askPeer(ctx, address)
			if err == nil {
				r.log.Info("this replica is a member of the group", "asked", name)
				return nil
			}
			errs = append(errs, fmt.Errorf("%s: %w", name, err))
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		r.log.Warn("asking for membership", "err", errors.Join(errs...))
		if err := wait.Delay(ctx, retry.Next()); err != nil {
			return err
		}
	}
}

func (r *Replica) askPeer(ctx context.Context, address string) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	conn, err := grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(credentials.NewTLS(r.peerTLS.Clone())))
	if err != nil {
		return err
	}
	defer conn.Close()
	_, err = storev1.NewPeerClient(conn).AddMember(ctx, &storev1.AddMemberRequest{Id: r.cfg.Name, Address: at(r.cfg.Advertise, r.cluster.PeerPort)})
	return err
}

// newToken makes and records a join token.
func (r *Replica) newToken(ctx context.Context, role pki.Role, life time.Duration) (pki.Token, error) {
	t := pki.NewToken(role, r.trust.CA.Cert)
	return t, r.recordToken(ctx, 0, t, time.Now().Add(life), "made by an administrator")
}
