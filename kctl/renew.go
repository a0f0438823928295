package kctl

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"

	"github.com/spf13/cobra"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"

	"keelson.dev/keelson/controlplane/api"
)

func renewCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	return &cobra.Command{
		Use:   "renew",
		Short: "Renew the CAs and the client certificate of the kubeconfig in use",
		Long: "Renew the current context of the kubeconfig in use. The CAs that the cluster currently trusts are\n" +
			"written to it. Its client certificate is replaced by a new one with the same name, groups and\n" +
			"lifetime, signed by the current CA. A user with a token keeps the token.\n" +
			"\n" +
			"Run this command for every administrator's kubeconfig when 'kctl cluster rotate cluster-ca' is in\n" +
			"the step 'wait'. Run it again when the rotation is done, to remove the previous CA.",
		Example: "  kctl cluster renew\n  kctl cluster renew --kubeconfig other.kubeconfig",
		Args:    cobra.NoArgs,
		RunE:    func(*cobra.Command, []string) error { return renewKubeconfig(f, streams) },
	}
}

func renewKubeconfig(f cmdutil.Factory, streams genericiooptions.IOStreams) error {
	loader := f.ToRawKubeConfigLoader()
	all, err := loader.RawConfig()
	if err != nil {
		return err
	}
	cluster, user, err := currentEntries(&all)
	if err != nil {
		return err
	}
	var q api.ClusterKubeconfig
	var key []byte
	certified := len(user.ClientCertificateData) > 0 || user.ClientCertificate != ""
	if certified {
		if key, q.CSR, err = newKeyAndCSR(); err != nil {
			return err
		}
	}
	var got api.ClusterKubeconfigResult
	if err := callAPI(f, "POST", api.PathClusterKubeconfig, q, &got); err != nil {
		return err
	}
	authorities := 0
	for block, rest := pem.Decode(got.CA); block != nil; block, rest = pem.Decode(rest) {
		authorities++
	}
	if authorities == 0 || certified && len(got.Certificate) == 0 {
		return errors.New("the cluster's response has no certificate: the kubeconfig was not changed")
	}
	cluster.CertificateAuthorityData, cluster.CertificateAuthority = got.CA, ""
	if certified {
		user.ClientCertificateData, user.ClientCertificate = got.Certificate, ""
		user.ClientKeyData, user.ClientKey = key, ""
	}
	if err := clientcmd.ModifyConfig(loader.ConfigAccess(), all, false); err != nil {
		return fmt.Errorf("writing the kubeconfig: %w", err)
	}
	what := "its user has a token and keeps it"
	if certified {
		what = "a new client certificate"
	}
	fmt.Fprintf(streams.Out, "kubeconfig renewed: authorities that context %s believes: %d; %s\n", all.CurrentContext,
		authorities, what)
	return nil
}

// currentEntries returns the cluster entry and the user entry of the current context in kubeconfig
// c. It fails if either does not exist.
func currentEntries(c *clientcmdapi.Config) (*clientcmdapi.Cluster, *clientcmdapi.AuthInfo, error) {
	at := c.Contexts[c.CurrentContext]
	if at == nil || c.Clusters[at.Cluster] == nil || c.AuthInfos[at.AuthInfo] == nil {
		return nil, nil,
			fmt.Errorf("context %q of the kubeconfig refers to a cluster or a user that does not exist in it",
				c.CurrentContext)
	}
	return c.Clusters[at.Cluster], c.AuthInfos[at.AuthInfo], nil
}

// newKeyAndCSR returns a new private key and a certificate signing request for it, in PEM. The
// request has no subject: the API server copies the subject from the client's current certificate.
func newKeyAndCSR() (key, csr []byte, err error) {
	made, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, made)
	if err != nil {
		return nil, nil, err
	}
	raw, err := x509.MarshalPKCS8PrivateKey(made)
	if err != nil {
		return nil, nil, err
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: raw}),
		pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}), nil
}
