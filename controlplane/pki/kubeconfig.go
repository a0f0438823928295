package pki

import (
	"fmt"

	"k8s.io/apimachinery/pkg/runtime"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	clientcmdlatest "k8s.io/client-go/tools/clientcmd/api/latest"
)

// Kubeconfig contains the data of a kubeconfig file: one cluster and one user. The user has either
// CertPEM and KeyPEM, or Token.
type Kubeconfig struct {
	Cluster string // name of the cluster entry and of the context
	Server  string // URL of the API server, such as "https://127.0.0.1:6443"
	CAPEM   []byte
	User    string // name of the user entry; empty means Cluster
	CertPEM []byte
	KeyPEM  []byte
	Token   string
}

// Config returns the kubeconfig as a client-go Config, with all certificates and keys embedded.
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

// Encode returns the kubeconfig as YAML.
func (k Kubeconfig) Encode() ([]byte, error) {
	data, err := runtime.Encode(clientcmdlatest.Codec, k.Config())
	if err != nil {
		return nil, fmt.Errorf("pki: encoding the kubeconfig of cluster %s: %w", k.Cluster, err)
	}
	return data, nil
}

// Write writes the kubeconfig to path with mode 0600. An existing file is replaced.
func (k Kubeconfig) Write(path string) error {
	data, err := k.Encode()
	if err != nil {
		return err
	}
	return WriteFile(path, data)
}
