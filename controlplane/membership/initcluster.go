package membership

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

// InitOptions are the options of InitCluster that are not part of the cluster's configuration. Zero
// values mean defaults.
type InitOptions struct {
	KubeconfigServer string // URL of the API in the kubeconfig; empty: the API address of this replica
	NodeTokenUses    int    // number of workers that may join with the token for nodes; 0 means 100
	ReplicaTokenUses int    // number of replicas that may join with the token for replicas; 0 means 1
}

func (f *InitOptions) setDefaults(c datadir.Dir, cluster datadir.Cluster) error {
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
		if *u.uses < 1 || *u.uses > pki.MaxTokenUses {
			return fmt.Errorf("%s %d: want 1 to %d", u.flag, *u.uses, pki.MaxTokenUses)
		}
	}
	return nil
}

// InitResult contains the first join tokens and the paths of the files that InitCluster created.
type InitResult struct {
	NodeToken         string `json:"nodeToken"`
	ControlPlaneToken string `json:"controlPlaneToken"`
	Kubeconfig        string `json:"kubeconfig"` // path of the administrator's kubeconfig
	// path of the store's new key file; empty if no key file was created
	EncryptionKeys string `json:"encryptionKeys,omitempty"`
}

// InitCluster creates a new cluster in the data directory of this replica: the CAs and keys, the
// configuration, the first join tokens and the kubeconfig of the administrator. It returns an error
// if the directory already belongs to a cluster.
func InitCluster(c datadir.Dir, cluster datadir.Cluster, o InitOptions) (InitResult, error) {
	cluster.SetDefaults()
	err := errors.Join(validateNewName("--name", c.Name), validateNewName("--cluster-name", cluster.Name))
	if err != nil {
		return InitResult{}, err
	}
	if err := cluster.Validate(); err != nil {
		return InitResult{}, err
	}
	if err := cluster.CheckAdvertise(c.Advertise); err != nil {
		return InitResult{}, err
	}
	if err := o.setDefaults(c, cluster); err != nil {
		return InitResult{}, err
	}
	now := time.Now()
	trust, err := initTrust(c, cluster, now)
	if err != nil {
		return InitResult{}, err
	}
	cluster.Encrypted = c.Store.Keys != datadir.NoKeys
	if err := cluster.SetID(trust); err != nil {
		return InitResult{}, err
	}
	node, replica := pki.NewToken(pki.RoleNode, trust.CA.Cert), pki.NewToken(pki.RoleControlPlane, trust.CA.Cert)
	f := initialTokensFile{
		Tokens: []string{node.String(), replica.String()}, Expires: now.Add(pki.NodeTokenLife),
		ReplicasUntil: now.Add(pki.ReplicaTokenLife),
		NodeUses:      o.NodeTokenUses, ReplicaUses: o.ReplicaTokenUses,
	}
	if err := datadir.WriteJSON(filepath.Join(c.Path, datadir.FounderFile), f); err != nil {
		return InitResult{}, err
	}
	admin, err := trust.CA.Issue(pki.Admin(), now)
	if err != nil {
		return InitResult{}, err
	}
	out := InitResult{NodeToken: node.String(), ControlPlaneToken: replica.String(),
		Kubeconfig: filepath.Join(c.Path, datadir.AdminFile)}
	if trust.StoreKeys != nil {
		out.EncryptionKeys = datadir.KeyFile(c.Path)
	}
	err = pki.Kubeconfig{
		Cluster: cluster.Name, Server: o.KubeconfigServer, CAPEM: trust.CA.PEM(), User: "keelson-admin",
		CertPEM: admin.CertPEM, KeyPEM: admin.KeyPEM,
	}.Write(out.Kubeconfig)
	if err != nil {
		return InitResult{}, err
	}
	if err := c.SaveAddress(); err != nil {
		return out, err
	}
	// cluster.json is written last: a directory that contains this file is complete.
	return out, datadir.WriteJSON(filepath.Join(c.Path, datadir.ClusterFile), cluster)
}

// validateNewName returns an error if name is not a DNS label. The error contains flag, the flag
// that sets the name. Only names of new replicas and clusters are checked: an existing replica or
// cluster keeps its name.
func validateNewName(flag, name string) error {
	if msgs := validation.IsDNS1123Label(name); len(msgs) > 0 {
		return fmt.Errorf("%s %q: %s: choose another name", flag, name, strings.Join(msgs, "; "))
	}
	return nil
}

// initTrust creates the keys and CAs of a new cluster and writes them to the data directory. They
// include the encryption key of the stores.
func initTrust(c datadir.Dir, cluster datadir.Cluster, now time.Time) (*pki.Trust, error) {
	trust, err := pki.NewTrust(cluster.Name, now)
	if err != nil {
		return nil, err
	}
	if trust.StoreKeys, err = c.Store.NewKeys(now); err != nil {
		return nil, err
	}
	err = trust.Save(filepath.Join(c.Path, datadir.PKIFolder))
	if errors.Is(err, pki.ErrExists) {
		return nil,
			fmt.Errorf("%s already belongs to a cluster: start the replica with 'keelson-controlplane run', or remove "+
				"the folder to create a new cluster",
				c.Path)
	}
	return trust, err
}

// Join prepares the data directory c of this replica, so that it joins an existing cluster at its
// next start. It requests the CAs and keys of the cluster from each of servers in turn, until one
// responds, for at most a minute. It writes them to disk. It verifies the TLS connection by the CA
// hash in token. After its start, BecomeMember makes the replica a member: a standby (a member
// without a vote) if standby is true, and otherwise a voter.
func Join(ctx context.Context, c datadir.Dir, standby bool, token string, servers []string) error {
	t, err := pki.ParseToken(token)
	if err != nil {
		return fmt.Errorf("--token: %w", err)
	}
	if t.Role != pki.RoleControlPlane {
		return fmt.Errorf("--token is for role %q: create a token for a replica with 'kctl cluster token create "+
			"--role controlplane'",
			t.Role)
	}
	if _, err := os.Stat(filepath.Join(c.Path, datadir.ClusterFile)); err == nil {
		return fmt.Errorf("%s already belongs to a cluster: start the replica with 'keelson-controlplane run'", c.Path)
	}
	servers, err = parseServerAddresses(servers)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	var response *fleetv1.EnrollReplicaResponse
	var permanentErr error
	err = wait.For(ctx, 100*time.Millisecond, func() error {
		var errs []error
		for _, s := range servers {
			a, err := requestEnrollment(ctx, s, t, c)
			if err == nil {
				response = a
				return nil
			}
			switch status.Code(err) {
			case codes.Unauthenticated, codes.InvalidArgument, codes.PermissionDenied:
				permanentErr = fmt.Errorf("requesting enrollment from %s: %w", s, err)
				cancel() // another attempt would get the same response
			}
			errs = append(errs, fmt.Errorf("requesting enrollment from %s: %w", s, err))
		}
		return errors.Join(errs...)
	})
	if err != nil {
		return fmt.Errorf("joining as replica %s: %w", c.Name, cmp.Or(permanentErr, err))
	}
	return saveEnrollment(c, standby, response)
}

// parseServerAddresses returns the addresses of replicas as HOST:PORT. The default port is the port
// for agents, which also serves enrollment.
func parseServerAddresses(servers []string) ([]string, error) {
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

// requestEnrollment sends one enrollment request with the token t to the replica at server, and
// returns the response.
func requestEnrollment(ctx context.Context, server string, t pki.Token, c datadir.Dir) (
	*fleetv1.EnrollReplicaResponse, error,
) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	tls := pki.PinnedTLS(t, func(*x509.Certificate) {}, time.Now)
	// An HTTP proxy in the environment of this machine is not used, because it may not reach the
	// replicas.
	conn, err := grpc.NewClient("passthrough:///"+server, grpc.WithTransportCredentials(credentials.NewTLS(tls)),
		grpc.WithNoProxy())
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	return fleetv1.NewEnrollmentClient(conn).EnrollReplica(ctx, &fleetv1.EnrollReplicaRequest{
		Token: t.String(), Name: c.Name, PeerAddress: c.Advertise, FeatureLevel: c.FeatureLevel,
	})
}

// saveReceivedTrust writes trust, the CAs, keys and secrets that the cluster has sent, to the data
// directory. If an interrupted join has already written the same trust, it changes nothing. Files
// with a different trust are moved to another directory: they are from another cluster, or from
// before a key rotation. If the directory also contains raft data, a replica has used these files,
// and saveReceivedTrust returns an error instead.
func saveReceivedTrust(c datadir.Dir, trust *pki.Trust) error {
	folder := filepath.Join(c.Path, datadir.PKIFolder)
	err := trust.Save(folder)
	if !errors.Is(err, pki.ErrExists) {
		return err
	}
	want, err := trust.Marshal()
	if err != nil {
		return err
	}
	if existing, err := pki.Load(folder); err == nil {
		if have, err := existing.Marshal(); err == nil && bytes.Equal(have, want) {
			return nil
		}
	}
	if has, err := c.HasRaftData(); err != nil || has {
		return errors.Join(err,
			fmt.Errorf("%s has a store and keys of another cluster, but no %s: it may be the data of another cluster: "+
				"move it aside, or restore %s",
				c.Path, datadir.ClusterFile, datadir.ClusterFile))
	}
	if err := os.Rename(folder, folder+".aside-"+time.Now().UTC().Format("20060102T150405.000000Z")); err != nil {
		return err
	}
	return trust.Save(folder)
}

// trustBundleName is the name of the file in an EnrollReplicaResponse that contains the CAs, keys
// and secrets of the cluster.
const trustBundleName = "trust.json"

// saveEnrollment writes the contents of response to the data directory: the keys and CAs, the
// replicas from which to request membership, and the configuration of the cluster. It also writes
// the address of this replica, and StandbyFile if standby is true.
func saveEnrollment(c datadir.Dir, standby bool, response *fleetv1.EnrollReplicaResponse) error {
	trust, err := pki.UnmarshalTrust(response.GetFiles()[trustBundleName])
	if err != nil {
		return fmt.Errorf("decoding the response of the cluster: %w", err)
	}
	var cluster datadir.Cluster
	if err := json.Unmarshal([]byte(response.GetClusterConfigJson()), &cluster); err != nil {
		return fmt.Errorf("decoding the response of the cluster: %w", err)
	}
	if err := saveReceivedTrust(c, trust); err != nil {
		return err
	}
	peers := map[string]string{}
	for _, r := range response.GetReplicas() {
		host, _, err := net.SplitHostPort(r.GetApiAddress())
		if err != nil {
			return fmt.Errorf("decoding the response of the cluster: %w", err)
		}
		peers[r.GetName()] = datadir.HostPort(host, cluster.PeerPort)
	}
	if err := datadir.WriteJSON(filepath.Join(c.Path, datadir.PeersFile), peers); err != nil {
		return err
	}
	if err := c.SaveAddress(); err != nil {
		return err
	}
	standbyPath := filepath.Join(c.Path, datadir.StandbyFile)
	if standby {
		err = datadir.WriteJSON(standbyPath, datadir.StandbyRecord{Version: datadir.StandbyVersion})
	} else if err = os.Remove(standbyPath); errors.Is(err, fs.ErrNotExist) {
		// an earlier join as a standby may have been interrupted
		err = nil
	}
	if err != nil {
		return err
	}
	return datadir.WriteJSON(filepath.Join(c.Path, datadir.ClusterFile), cluster)
}
