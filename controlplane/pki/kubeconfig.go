package pki

import (
	"fmt"

	"k8s.io/apimachinery/pkg/runtime"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	clientcmdlatest "k8s.io/client-go/tools/clientcmd/api/latest"
)

// Kubeconfig says how to reach a cluster and as whom. Either Cert and Key or Token is set.
type Kubeconfig struct {
	Cluster string // name of cluster and context
	Server  string // "https://127.0.0.1:6443"
	CAPEM   []byte
	User    string // name of the entry; "" = the cluster's
	CertPEM []byte
	KeyPEM  []byte
	Token   string
}

// Config is the kubeconfig as clients' own type, everything embedded: the file stands alone.
func (k Kubeconfig) Config() *clientcmdapi.Config {
	user := k.User
	if user == "" {
		user = k.Cluster
	}
	c := clientcmdapi.NewConfig()
	c.Clusters[k.Cluster] = &clientcmdapi.Cluster{Server: k.Server, CertificateAuthorityData: k.CAPEM}
	c.AuthInfos[user] = &clientcmdapi.AuthInfo{
		ClientCertificateData: k.CertPEM, ClientKeyData: k.KeyPEM, Token: k.Token,
	}
	c.Contexts[k.Cluster] = &clientcmdapi.Context{Cluster: k.Cluster, AuthInfo: user}
	c.CurrentContext = k.Cluster
	return c
}

// Encode is the kubeconfig as YAML.
func (k Kubeconfig) Encode() ([]byte, error) {
	data, err := runtime.Encode(clientcmdlatest.Codec, k.Config())
	if err != nil {
		return nil, fmt.Errorf("pki: encoding the kubeconfig of cluster %s: %w", k.Cluster, err)
	}
	return data, nil
}

// Write writes the kubeconfig to path, mode 0600, replacing what was there.
func (k Kubeconfig) Write(path string) error {
	data, err := k.Encode()
	if err != nil {
		return err
	}
	return WriteFile(path, data)
}
