package provision

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"keelson.dev/keelson/deploy/machines/execute"
	"keelson.dev/keelson/internal/durable"
)

// machinesKubeconfig returns the default path to which 'kctl cluster up' writes the kubeconfig of
// the cluster with that name.
func machinesKubeconfig(name string) string {
	home, err := os.UserHomeDir()
	if err != nil {
		home = "/root"
	}
	return filepath.Join(home, ".kube", "keelson-"+name)
}

// storeKubeconfig fetches the administrator's kubeconfig from a machine of site. It writes the
// kubeconfig to a separate file, or with --merge-kubeconfig into the user's default kubeconfig. It
// prints the path to out.
func (r *installFlags) storeKubeconfig(ctx context.Context, out io.Writer, site *execute.Site) error {
	raw, err := site.Kubeconfig(ctx)
	if err != nil {
		return err
	}
	if r.merge {
		to := clientcmd.NewDefaultPathOptions().GetDefaultFilename()
		if err := mergeKubeconfig(raw, to, site.Cluster.Name); err != nil {
			return err
		}
		fmt.Fprintf(out, "%s has the context %s\n", to, site.Cluster.Name)
		return nil
	}
	to := r.kubeconfig
	if to == "" {
		to = machinesKubeconfig(site.Cluster.Name)
	}
	if err := writeKubeconfig(raw, to); err != nil {
		return err
	}
	fmt.Fprintf(out, "kubeconfig: %s\n", to)
	return nil
}

// writeKubeconfig writes kubeconfig raw to the file path. An existing kubeconfig of another cluster
// is renamed to FILE.before, because it may contain the only copy of a private key. If the existing
// user's certificate expires later than that in raw (after 'kctl cluster renew'), the existing user
// is kept. The server and the CA are always taken from raw.
func writeKubeconfig(raw []byte, path string) error {
	if before, err := os.ReadFile(path); err == nil && !shareCA(before, raw) {
		if err := os.Rename(path, path+".before"); err != nil {
			return err
		}
	} else if err == nil {
		if kubeconfigExpiry(before).After(kubeconfigExpiry(raw)) {
			if raw, err = withUserFrom(raw, before); err != nil {
				return err
			}
		}
		if bytes.Equal(before, raw) {
			return nil
		}
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	return durable.WriteWith(path, raw, durable.Options{Level: durable.Atomic, TempPattern: ".kubeconfig-"})
}

// errNoContext is returned if the kubeconfig that a replica's machine has sent has no current
// context.
var errNoContext = errors.New("the administrator's kubeconfig (admin.kubeconfig in a replica's data directory) has " +
	"no current context: set one with 'kubectl config use-context' on every control-plane machine")

// withUserFrom returns kubeconfig raw, with its current user replaced by the current user of
// kubeconfig other.
func withUserFrom(raw, other []byte) ([]byte, error) {
	c, err := clientcmd.Load(raw)
	from, err2 := clientcmd.Load(other)
	if err := errors.Join(err, err2); err != nil {
		return nil, err
	}
	to := c.Contexts[c.CurrentContext]
	if to == nil {
		return nil, errNoContext
	}
	// The user exists, because kubeconfigExpiry has read its certificate.
	c.AuthInfos[to.AuthInfo] = from.AuthInfos[from.Contexts[from.CurrentContext].AuthInfo]
	return clientcmd.Write(*c)
}

// kubeconfigExpiry returns the time at which the client certificate of the current user in
// kubeconfig raw expires. It returns the zero time if there is no such certificate.
func kubeconfigExpiry(raw []byte) time.Time {
	c, err := clientcmd.Load(raw)
	if err != nil || c.Contexts[c.CurrentContext] == nil {
		return time.Time{}
	}
	return certificateExpiry(c.AuthInfos[c.Contexts[c.CurrentContext].AuthInfo])
}

func certificateExpiry(user *clientcmdapi.AuthInfo) time.Time {
	if user == nil {
		return time.Time{}
	}
	block, _ := pem.Decode(user.ClientCertificateData)
	if block == nil {
		return time.Time{}
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return time.Time{}
	}
	return cert.NotAfter
}

// shareCA reports whether kubeconfigs a and b contain the same CA, so that they are for the same
// cluster.
func shareCA(a, b []byte) bool {
	x, err := clientcmd.Load(a)
	y, err2 := clientcmd.Load(b)
	if err != nil || err2 != nil {
		return false
	}
	for _, one := range x.Clusters {
		for _, other := range y.Clusters {
			if len(one.CertificateAuthorityData) > 0 &&
				bytes.Equal(one.CertificateAuthorityData, other.CertificateAuthorityData) {
				return true
			}
		}
	}
	return false
}

// mergeKubeconfig adds the cluster and the user of kubeconfig raw to the kubeconfig file path. It
// adds a context of the given name and makes it current. An existing user is kept if its
// certificate expires later. It fails if the file has another cluster with that name.
func mergeKubeconfig(raw []byte, path, name string) error {
	from, err := clientcmd.Load(raw)
	if err != nil {
		return fmt.Errorf("the administrator's kubeconfig: %w", err)
	}
	c := from.Contexts[from.CurrentContext]
	if c == nil || from.Clusters[c.Cluster] == nil || from.AuthInfos[c.AuthInfo] == nil {
		return errNoContext
	}
	into, err := clientcmd.LoadFromFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		into, err = clientcmdapi.NewConfig(), nil
	}
	if err != nil {
		return fmt.Errorf("reading %s: %w", path, err)
	}
	if old := into.Clusters[name]; old != nil &&
		!bytes.Equal(old.CertificateAuthorityData, from.Clusters[c.Cluster].CertificateAuthorityData) {
		return fmt.Errorf("%s contains another cluster %s: rename it, delete it ('kctl config delete-cluster %s'), or "+
			"leave out --merge-kubeconfig", path, name, name)
	}
	user := name + "-admin"
	if into.Clusters[name] == nil ||
		!certificateExpiry(into.AuthInfos[user]).After(certificateExpiry(from.AuthInfos[c.AuthInfo])) {
		into.AuthInfos[user] = from.AuthInfos[c.AuthInfo]
	}
	into.Clusters[name] = from.Clusters[c.Cluster]
	into.Contexts[name] = &clientcmdapi.Context{Cluster: name, AuthInfo: user}
	into.CurrentContext = name
	return clientcmd.WriteToFile(*into, path)
}
