package keyrotation

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"k8s.io/client-go/tools/clientcmd"

	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/internal/wait"
)

// applyClusterCA applies a changed cluster CA. It reloads the front proxy CA, which expires with
// the cluster CA, and renews the connections to other replicas and the administrator's kubeconfig.
// It does nothing if the cluster CA has not changed.
func (r *Rotator) applyClusterCA() error {
	signing, pool := r.config.CA.SigningCA().Cert, r.config.CA.Pool()
	if r.appliedCA != nil && r.appliedCA.Equal(signing) && r.appliedPool.Equal(pool) {
		return nil
	}
	trust, err := r.keys.loadTrust()
	if err != nil {
		return err
	}
	front, err := trust.FrontProxyCA() // its certificate expires with that of the cluster CA
	if err != nil {
		return err
	}
	r.frontProxy.Store(front)
	r.config.Replica.ReconnectPeers()
	if err := r.renewKubeconfig(); err != nil {
		return err
	}
	r.appliedCA, r.appliedPool = signing, pool
	return nil
}

// KubeconfigInterval is how often a replica lets RenewKubeconfig check the certificate.
const KubeconfigInterval = time.Hour

// RenewKubeconfig renews the administrator's kubeconfig in the data directory before its
// certificate expires, until ctx ends. It checks the certificate's age at each interval. A failed
// renewal is attempted again at the next check, because the replica can serve without that file.
func (r *Rotator) RenewKubeconfig(ctx context.Context, interval time.Duration) error {
	for {
		if err := r.renewKubeconfig(); err != nil {
			r.config.Log.Warn("the administrator's kubeconfig in the data directory could not be renewed", "err", err)
		}
		if err := wait.Delay(ctx, interval); err != nil {
			return err
		}
	}
}

// renewKubeconfig renews the administrator's kubeconfig if the data directory contains one. It
// leaves a file unchanged that was edited after the cluster was created.
func (r *Rotator) renewKubeconfig() error {
	r.kubeconfigMutex.Lock()
	defer r.kubeconfigMutex.Unlock()
	path := filepath.Join(r.config.DataDir, datadir.AdminFile)
	raw, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	next, err := renewedKubeconfig(raw, r.config.CA, time.Now())
	if err != nil {
		r.config.Log.Warn("the administrator's kubeconfig in the data directory is not renewed", "file",
			path, "err", err)
		return nil
	}
	if next == nil {
		return nil
	}
	return pki.WriteFile(path, next)
}

// renewedKubeconfig returns the kubeconfig raw with the current CAs and a new certificate of the
// signing CA. It returns nil if that is not necessary: the kubeconfig has the current CAs and a
// certificate of the signing CA, and less than two thirds of its lifetime have passed.
func renewedKubeconfig(raw []byte, ca *pki.ClusterCA, now time.Time) ([]byte, error) {
	config, err := clientcmd.Load(raw)
	if err != nil {
		return nil, err
	}
	current := config.Contexts[config.CurrentContext]
	if current == nil || config.Clusters[current.Cluster] == nil || config.AuthInfos[current.AuthInfo] == nil {
		return nil, errors.New("its current context has no cluster or no user")
	}
	cluster, user := config.Clusters[current.Cluster], config.AuthInfos[current.AuthInfo]
	leaf, err := pki.DecodeCert(user.ClientCertificateData)
	if err != nil {
		return nil, fmt.Errorf("its client certificate: %w", err)
	}
	valid := pki.IssuedBy(leaf, ca.SigningCA().Cert) &&
		now.Before(leaf.NotBefore.Add(leaf.NotAfter.Sub(leaf.NotBefore)*2/3))
	if slices.Equal(cluster.CertificateAuthorityData, ca.PEM()) && valid {
		return nil, nil
	}
	cluster.CertificateAuthorityData = ca.PEM()
	if !valid {
		issued, err := ca.SigningCA().Issue(pki.Client(leaf.Subject.CommonName, leaf.Subject.Organization...), now)
		if err != nil {
			return nil, err
		}
		user.ClientCertificateData, user.ClientKeyData = issued.CertPEM, issued.KeyPEM
	}
	return clientcmd.Write(*config)
}
