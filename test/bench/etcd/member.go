package main

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.etcd.io/etcd/api/v3/version"
	"go.etcd.io/etcd/client/pkg/v3/transport"
	"go.etcd.io/etcd/client/pkg/v3/types"
	"go.etcd.io/etcd/server/v3/embed"
	"go.etcd.io/etcd/server/v3/etcdserver"

	"keelson.dev/keelson/test/bench/etcd/drive"
)

// quota is the size limit of etcd's database in bytes, large enough for everything that the
// benchmark stores.
const quota = 8 << 30

func etcdVersion() string { return version.Version }

// memberConfig returns a member's configuration: TLS between peers, no TLS for clients, and fsync.
// Everything else is etcd's default, except the quota and the log level.
func memberConfig(s drive.Setup) *embed.Config {
	c := embed.NewConfig()
	c.Name, c.Dir = s.Name, s.Dir
	peer := url.URL{Scheme: "https", Host: s.Peer}
	client := url.URL{Scheme: "http", Host: s.ClientAddress}
	c.ListenPeerUrls, c.AdvertisePeerUrls = []url.URL{peer}, []url.URL{peer}
	c.ListenClientUrls, c.AdvertiseClientUrls = []url.URL{client}, []url.URL{client}
	c.PeerTLSInfo = transport.TLSInfo{CertFile: s.CertFile, KeyFile: s.KeyFile, TrustedCAFile: s.CAFile,
		ClientCertAuth: true}
	var members []string
	for name, address := range s.Cluster {
		members = append(members, name+"=https://"+address)
	}
	c.InitialCluster = strings.Join(members, ",")
	c.ClusterState = embed.ClusterStateFlagNew // ignored by a member that has data
	c.QuotaBackendBytes = quota
	c.LogLevel = "panic" // failures of the member are reported as errors
	c.LogOutputs = []string{"stderr"}
	return c
}

func serveMember(ctx context.Context, s drive.Setup, orders *drive.RequestReader) error {
	e, err := embed.StartEtcd(memberConfig(s))
	if err != nil {
		return fmt.Errorf("starting member %s: %w", s.Name, err)
	}
	defer e.Close()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	served := make(chan struct{})
	go func() {
		defer close(served)
		orders.ServeRequests(ctx, os.Stdout, func(ctx context.Context, o drive.Request) drive.Reply {
			return executeMemberRequest(ctx, e.Server, o)
		})
	}()
	select {
	case <-served: // stdin was closed
		return nil
	case <-ctx.Done(): // terminated: Close transfers leadership, as etcd does
		return nil
	case err := <-e.Err():
		return fmt.Errorf("member %s: %w", s.Name, err)
	case <-e.Server.StopNotify():
		return fmt.Errorf("member %s has stopped", s.Name)
	}
}

func executeMemberRequest(ctx context.Context, s *etcdserver.EtcdServer, o drive.Request) drive.Reply {
	switch o.Do {
	case drive.DoStatus:
		r := drive.Reply{Term: s.Term(), Ready: isReady(ctx, s)}
		if m := s.Cluster().Member(s.Leader()); m != nil {
			r.Leader = m.Name
		}
		return r
	case drive.DoApplied:
		return drive.Reply{Applied: s.AppliedIndex()}
	case drive.DoMeters:
		return memberMeters()
	case drive.DoCollect:
		return drive.CollectGarbage()
	case drive.DoTransfer:
		if err := transferLeadership(ctx, s); err != nil {
			return drive.ErrorReply(err)
		}
		return drive.Reply{}
	}
	return drive.ErrorReply(errors.New("unknown order of a member: " + o.Do))
}

// memberMeters returns the metrics of this member: its counters and its memory.
func memberMeters() drive.Reply {
	out := drive.RuntimeMeters()
	out[drive.MeterInstalled] = 0 // etcd has this counter per sender, from the first snapshot on
	families, err := prometheus.DefaultGatherer.Gather()
	if err != nil {
		return drive.ErrorReply(err)
	}
	for _, f := range families {
		if f.GetName() != "etcd_network_snapshot_receive_success" {
			continue
		}
		for _, m := range f.GetMetric() {
			out[drive.MeterInstalled] += m.GetCounter().GetValue()
		}
	}
	return drive.Reply{Meters: out}
}

// isReady reports whether this member can currently serve a linearizable read.
func isReady(ctx context.Context, s *etcdserver.EtcdServer) bool {
	select {
	case <-s.ReadyNotify():
	default:
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, 200*time.Millisecond)
	defer cancel()
	return s.LinearizableReadNotify(ctx) == nil
}

// transferLeadership transfers leadership from this member to another.
func transferLeadership(ctx context.Context, s *etcdserver.EtcdServer) error {
	if s.Leader() != s.MemberID() {
		return errors.New("not the leader")
	}
	to := types.ID(0)
	for _, m := range s.Cluster().Members() {
		if m.ID != s.MemberID() {
			to = m.ID
		}
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	return s.MoveLeader(ctx, uint64(s.MemberID()), uint64(to))
}
