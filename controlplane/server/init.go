package server

import (
	"bytes"
	"cmp"
	"context"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/util/validation"

	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/internal/wait"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// Founding is what may be chosen of a new cluster besides its configuration.
type Founding struct {
	KubeconfigServer string // the API's URL in the kubeconfig; default this replica
	NodeTokenUses    int    // how many workers may join with the first token; default 100
	ReplicaTokenUses int    // how many replicas may join with the other; default 1
}

func (f *Founding) defaults(c Config, cluster datadir.Cluster) error {
	if f.KubeconfigServer == "" {
		f.KubeconfigServer = "https://" + datadir.HostPort(c.Advertise, cluster.APIPort)
	}
	for _, u := range []struct {
		flag string
		uses *int
		d    int
	}{{"--node-token-uses", &f.NodeTokenUses, 100}, {"--replica-token-uses", &f.ReplicaTokenUses, 1}} {
		if *u.uses == 0 {
			*u.uses = u.d
		}
		if *u.uses < 1 || *u.uses > maxTokenUses {
			return fmt.Errorf("%s %d: want 1 to %d", u.flag, *u.uses, maxTokenUses)
		}
	}
	return nil
}

// Founded is what making a cluster yields.
type Founded struct {
	NodeToken         string `json:"nodeToken"`
	ControlPlaneToken string `json:"controlPlaneToken"`
	Kubeconfig        string `json:"kubeconfig"`               // path of the administrator's
	EncryptionKeys    string `json:"encryptionKeys,omitempty"` // path of the store's key file, where Init made one
}

// founder waits on disk for the store to exist: the tokens as they will be recorded.
type founder struct {
	Tokens        []string  `json:"tokens"`
	Expires       time.Time `json:"expires"`
	ReplicasUntil time.Time `json:"replicasUntil"` // when the token for replicas expires
	NodeUses      int       `json:"nodeUses"`
	ReplicaUses   int       `json:"replicaUses"`
}

// Init makes a new cluster on this replica's disk: its trust, its configuration
// and the first join tokens. It refuses a folder that belongs to one.
func Init(c Config, cluster datadir.Cluster, o Founding) (Founded, error) {
	if err := c.check(); err != nil {
		return Founded{}, err
	}
	cluster.SetDefaults()
	if err := errors.Join(newName("--name", c.Name), newName("--cluster-name", cluster.Name)); err != nil {
		return Founded{}, err
	}
	if err := cluster.Validate(); err != nil {
		return Founded{}, err
	}
	if err := cluster.CheckAdvertise(c.Advertise); err != nil {
		return Founded{}, err
	}
	if err := o.defaults(c, cluster); err != nil {
		return Founded{}, err
	}
	now := time.Now()
	trust, err := c.initTrust(cluster, now)
	if err != nil {
		return Founded{}, err
	}
	cluster.Encrypted = c.Store.Keys != datadir.NoKeys
	if err := cluster.SetID(trust); err != nil {
		return Founded{}, err
	}
	node, replica := pki.NewToken(pki.RoleNode, trust.CA.Cert), pki.NewToken(pki.RoleControlPlane, trust.CA.Cert)
	f := founder{
		Tokens: []string{node.String(), replica.String()}, Expires: now.Add(nodeTokenLife), ReplicasUntil: now.Add(replicaTokenLife),
		NodeUses: o.NodeTokenUses, ReplicaUses: o.ReplicaTokenUses,
	}
	if err := datadir.WriteJSON(filepath.Join(c.DataDir, datadir.FounderFile), f); err != nil {
		return Founded{}, err
	}
	admin, err := trust.CA.Issue(pki.Admin(), now)
	if err != nil {
		return Founded{}, err
	}
	out := Founded{NodeToken: node.String(), ControlPlaneToken: replica.String(),
		Kubeconfig: filepath.Join(c.DataDir, datadir.AdminFile)}
	if trust.StoreKeys != nil {
		out.EncryptionKeys = datadir.KeyFile(c.DataDir)
	}
	err = pki.Kubeconfig{
		Cluster: cluster.Name, Server: o.KubeconfigServer, CAPEM: trust.CA.PEM(), User: "keelson-admin",
		CertPEM: admin.CertPEM, KeyPEM: admin.KeyPEM,
	}.Write(out.Kubeconfig)
	if err != nil {
		return Founded{}, err
	}
	if err := c.Dir().SaveAddress(); err != nil {
		return out, err
	}
	// Last: a folder with this file is a whole one.
	return out, datadir.WriteJSON(filepath.Join(c.DataDir, datadir.ClusterFile), cluster)
}

// newName refuses a name that no further replica could have (fleet's EnrollReplica). It is asked of what is made anew alone:
// what has such a name keeps it.
func newName(flag, name string) error {
	if msgs := validation.IsDNS1123Label(name); len(msgs) > 0 {
		return fmt.Errorf("%s %q: %s: give another name", flag, name, strings.Join(msgs, "; "))
	}
	return nil
}

// initTrust makes the keys of a new cluster, that of its stores among them, and writes them to the data folder.
func (c Config) initTrust(cluster datadir.Cluster, now time.Time) (*pki.Trust, error) {
	trust, err := pki.NewTrust(cluster.Name, now)
	if err != nil {
		return nil, err
	}
	if trust.StoreKeys, err = c.Store.NewKeys(now); err != nil {
		return nil, err
	}
	err = trust.Save(filepath.Join(c.DataDir, datadir.PKIFolder))
	if errors.Is(err, pki.ErrExists) {
		return nil, fmt.Errorf("%s belongs to a cluster already: start it with 'run', or remove the folder to make a new one",
			c.DataDir)
	}
	return trust, err
}

// Join makes this replica's disk part of an existing cluster: it fetches the
// trust over a connection that the token pins. Run then asks for membership.
func Join(ctx context.Context, c Config, token string, servers []string) error {
	if err := c.check(); err != nil {
		return err
	}
	t, err := pki.ParseToken(token)
	if err != nil {
		return fmt.Errorf("--token: %w", err)
	}
	if t.Role != pki.RoleControlPlane {
		return fmt.Errorf("--token is for role %q: make one with 'kctl cluster token create --role controlplane'", t.Role)
	}
	if _, err := os.Stat(filepath.Join(c.DataDir, datadir.ClusterFile)); err == nil {
		return fmt.Errorf("%s belongs to a cluster already: start it with 'run'", c.DataDir)
	}
	servers, err = fleetAddresses(servers)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	var answer *fleetv1.EnrollReplicaResponse
	var refused error
	err = wait.For(ctx, 100*time.Millisecond, func() error {
		var errs []error
		for _, s := range servers {
			a, err := enrollAt(ctx, s, t, c)
			if err == nil {
				answer = a
				return nil
			}
			switch status.Code(err) {
			case codes.Unauthenticated, codes.InvalidArgument, codes.PermissionDenied:
				refused = fmt.Errorf("asking %s: %w", s, err)
				cancel() // another attempt meets the same answer
			}
			errs = append(errs, fmt.Errorf("asking %s: %w", s, err))
		}
		return errors.Join(errs...)
	})
	if err != nil {
		return fmt.Errorf("joining as replica %s: %w", c.Name, cmp.Or(refused, err))
	}
	return keepJoined(c, answer)
}

// fleetAddresses completes addresses of replicas with the port at which they listen for agents.
func fleetAddresses(servers []string) ([]string, error) {
	var c datadir.Cluster
	c.SetDefaults()
	out := make([]string, len(servers))
	for i, s := range servers {
		host, port, err := net.SplitHostPort(s)
		switch {
		case err == nil && host != "" && port != "":
			out[i] = s
		case err != nil && s != "" && (!strings.Contains(s, ":") || net.ParseIP(strings.Trim(s, "[]")) != nil):
			out[i] = datadir.HostPort(strings.Trim(s, "[]"), c.FleetPort)
		default:
			return nil, fmt.Errorf("--server %q: want the address of a replica, or HOST:PORT", s)
		}
	}
	return out, nil
}

func enrollAt(ctx context.Context, server string, t pki.Token, c Config) (*fleetv1.EnrollReplicaResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	tls := pki.PinnedTLS(t, func(*x509.Certificate) {}, time.Now)
	// The proxy of this machine's environment is the way to other networks, and need not know replicas.
	conn, err := grpc.NewClient("passthrough:///"+server, grpc.WithTransportCredentials(credentials.NewTLS(tls)), grpc.WithNoProxy())
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	return fleetv1.NewEnrollmentClient(conn).EnrollReplica(ctx, &fleetv1.EnrollReplicaRequest{
		Token: t.String(), Name: c.Name, PeerAddress: c.Advertise, FeatureLevel: c.Dir().FeatureLevel,
	})
}

// saveJoined writes the trust that this replica has received. Keys that are there already may be of a join that was cut off:
// the same ones stay. Others, of another cluster or of before an exchange, are of no use and are moved aside: no replica has
// run with them, unless there is a store.
func (c Config) saveJoined(trust *pki.Trust) error {
	folder := filepath.Join(c.DataDir, datadir.PKIFolder)
	err := trust.Save(folder)
	if !errors.Is(err, pki.ErrExists) {
		return err
	}
	want, err := trust.Marshal()
	if err != nil {
		return err
	}
	if there, err := pki.Load(folder); err == nil {
		if have, err := there.Marshal(); err == nil && bytes.Equal(have, want) {
			return nil
		}
	}
	if has, err := c.Dir().HasRaftData(); err != nil || has {
		return errors.Join(err, fmt.Errorf("%s has keys that are not this cluster's, a store and no %s: it may be what is left of a cluster: move it aside, or bring %s back",
			c.DataDir, datadir.ClusterFile, datadir.ClusterFile))
	}
	if err := os.Rename(folder, folder+".aside-"+time.Now().UTC().Format("20060102T150405.000000Z")); err != nil {
		return err
	}
	return trust.Save(folder)
}

// bundleName is the one file in which a joining replica receives the trust.
const bundleName = "trust.json"

func keepJoined(c Config, a *fleetv1.EnrollReplicaResponse) error {
	trust, err := pki.UnmarshalTrust(a.GetFiles()[bundleName])
	if err != nil {
		return fmt.Errorf("the cluster's answer: %w", err)
	}
	var cluster datadir.Cluster
	if err := json.Unmarshal([]byte(a.GetClusterConfigJson()), &cluster); err != nil {
		return fmt.Errorf("the cluster's answer: %w", err)
	}
	if err := c.saveJoined(trust); err != nil {
		return err
	}
	peers := map[string]string{}
	for _, r := range a.GetReplicas() {
		host, _, err := net.SplitHostPort(r.GetApiAddress())
		if err != nil {
			return fmt.Errorf("the cluster's answer: %w", err)
		}
		peers[r.GetName()] = datadir.HostPort(host, cluster.PeerPort)
	}
	if err := datadir.WriteJSON(filepath.Join(c.DataDir, datadir.PeersFile), peers); err != nil {
		return err
	}
	if err := c.Dir().SaveAddress(); err != nil {
		return err
	}
	waits := filepath.Join(c.DataDir, datadir.StandbyFile)
	if c.Standby {
		err = datadir.WriteJSON(waits, datadir.StandbyRecord{Version: datadir.StandbyVersion})
	} else if err = os.Remove(waits); errors.Is(err, fs.ErrNotExist) { // it may be there of a join that was cut off
		err = nil
	}
	if err != nil {
		return err
	}
	return datadir.WriteJSON(filepath.Join(c.DataDir, datadir.ClusterFile), cluster)
}
