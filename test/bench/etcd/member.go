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

// quota leaves room for everything that the benchmark stores.
const quota = 8 << 30

func etcdVersion() string { return version.Version }

// config is a member as `etcd` with these flags would start it: peers with
// TLS, clients without, everything else at its default, fsync with it.
func config(s drive.Setup) *embed.Config {
	c := embed.NewConfig()
	c.Name, c.Dir = s.Name, s.Dir
	peer := url.URL{Scheme: "https", Host: s.Peer}
	door := url.URL{Scheme: "http", Host: s.Door}
	c.ListenPeerUrls, c.AdvertisePeerUrls = []url.URL{peer}, []url.URL{peer}
	c.ListenClientUrls, c.AdvertiseClientUrls = []url.URL{door}, []url.URL{door}
	c.PeerTLSInfo = transport.TLSInfo{CertFile: s.CertFile, KeyFile: s.KeyFile, TrustedCAFile: s.CAFile, ClientCertAuth: true}
	var members []string
	for name, address := range s.Cluster {
		members = append(members, name+"=https://"+address)
	}
	c.InitialCluster = strings.Join(members, ",")
	c.ClusterState = embed.ClusterStateFlagNew // a member that has data goes on with it
	c.QuotaBackendBytes = quota
	c.LogLevel = "panic" // the end of a member is told as errors
	c.LogOutputs = []string{"stderr"}
	return c
}

func serveMember(ctx context.Context, s drive.Setup, lines *drive.Lines) error {
	e, err := embed.StartEtcd(config(s))
	if err != nil {
		return fmt.Errorf("starting member %s: %w", s.Name, err)
	}
	defer e.Close()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	served := make(chan struct{})
	go func() {
		defer close(served)
		lines.Serve(ctx, os.Stdout, func(ctx context.Context, o drive.Order) drive.Reply { return obeyMember(ctx, e.Server, o) })
	}()
	select {
	case <-served: // stdin has ended
		return nil
	case <-ctx.Done(): // asked to end: Close hands the leadership over, as etcd does
		return nil
	case err := <-e.Err():
		return fmt.Errorf("member %s: %w", s.Name, err)
	case <-e.Server.StopNotify():
		return fmt.Errorf("member %s has stopped", s.Name)
	}
}

func obeyMember(ctx context.Context, s *etcdserver.EtcdServer, o drive.Order) drive.Reply {
	switch o.Do {
	case drive.DoStatus:
		r := drive.Reply{Term: s.Term(), Ready: ready(ctx, s)}
		if m := s.Cluster().Member(s.Leader()); m != nil {
			r.Leader = m.Name
		}
		return r
	case drive.DoApplied:
		return drive.Reply{Applied: s.AppliedIndex()}
	case drive.DoMeters:
		return meters()
	case drive.DoCollect:
		return drive.Collect()
	case drive.DoTransfer:
		if err := transfer(ctx, s); err != nil {
			return drive.Fail(err)
		}
		return drive.Reply{}
	}
	return drive.Fail(errors.New("a member does not know the order " + o.Do))
}

// meters are what a member counts, and its memory.
func meters() drive.Reply {
	out := drive.RuntimeMeters()
	out[drive.MeterInstalled] = 0 // etcd counts by sender, once there is one
	families, err := prometheus.DefaultGatherer.Gather()
	if err != nil {
		return drive.Fail(err)
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

// ready says whether a linearizable read through this member would succeed now.
func ready(ctx context.Context, s *etcdserver.EtcdServer) bool {
	select {
	case <-s.ReadyNotify():
	default:
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, 200*time.Millisecond)
	defer cancel()
	return s.LinearizableReadNotify(ctx) == nil
}

// transfer moves the leadership from this member to another.
func transfer(ctx context.Context, s *etcdserver.EtcdServer) error {
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
