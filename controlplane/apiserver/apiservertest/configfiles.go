package apiservertest

import (
	"context"
	"encoding/json"
	"encoding/pem"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"sync"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"keelson.dev/keelson/controlplane/apiserver"
	authnfile "keelson.dev/keelson/controlplane/apiserver/authn/config"
	authzfile "keelson.dev/keelson/controlplane/apiserver/authz/config"
	"keelson.dev/keelson/controlplane/apiserver/cel"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/internal/durable"
)

// ConfigFiles are the authentication and authorization options of a replica and their configuration
// files.
type ConfigFiles struct {
	Authn authnfile.Options
	Authz authzfile.Options

	t      *testing.T
	folder string
}

// NewConfigFiles returns ConfigFiles with the default options and without files.
func NewConfigFiles(t *testing.T) *ConfigFiles {
	return &ConfigFiles{t: t, folder: t.TempDir(), Authn: authnfile.Defaults(), Authz: authzfile.Defaults()}
}

// WriteFile writes a configuration file and returns its path. It replaces an existing file
// atomically.
func (a *ConfigFiles) WriteFile(name, text string) string {
	a.t.Helper()
	path := filepath.Join(a.folder, name)
	if err := durable.Write(path, []byte(text), durable.Atomic); err != nil {
		a.t.Fatal(err)
	}
	return path
}

// StartWebhook starts a webhook that h serves. It returns the path of a kubeconfig that refers to
// the webhook.
func (a *ConfigFiles) StartWebhook(name string, h http.HandlerFunc) string {
	a.t.Helper()
	srv := httptest.NewTLSServer(h)
	a.t.Cleanup(srv.Close)
	conf := clientcmdapi.NewConfig()
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: srv.Certificate().Raw})
	conf.Clusters["c"] = &clientcmdapi.Cluster{Server: srv.URL, CertificateAuthorityData: ca}
	conf.Contexts["x"] = &clientcmdapi.Context{Cluster: "c"}
	conf.CurrentContext = "x"
	path := filepath.Join(a.folder, name)
	if err := clientcmd.WriteToFile(*conf, path); err != nil {
		a.t.Fatal(err)
	}
	return path
}

// StartReplica starts a replica with the options, which reloads the files when they change.
func (a *ConfigFiles) StartReplica() *Replica {
	a.t.Helper()
	log := slog.New(slog.DiscardHandler)
	compilers := cel.New()
	authentication, err := authnfile.Load(authnfile.Config{
		Options: a.Authn, Compilers: compilers, Audiences: []string{pki.DefaultIssuer},
		Disallowed: []string{pki.DefaultIssuer},
		Clock:      time.Now, Log: log,
	})
	if err != nil {
		a.t.Fatal(err)
	}
	authorization, err := authzfile.Load(authzfile.Config{Options: a.Authz, Compilers: compilers,
		Clock: time.Now, Log: log})
	if err != nil {
		a.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	r := StartReplica(a.t, func(c *apiserver.Config) {
		c.Authentication.Configured, c.Authorization = authentication, authorization
	})
	var parts sync.WaitGroup
	parts.Go(func() { _ = authentication.Run(ctx) })
	parts.Go(func() { _ = authorization.Run(ctx) })
	a.t.Cleanup(func() { cancel(); parts.Wait() })
	return r
}

// WhoAmI returns the user as which a request with the token and headers is authenticated, and the
// status code of the response. An empty token means a request without a token.
func (r *Replica) WhoAmI(token string, headers ...string) (authenticationv1.UserInfo, int) {
	r.TB.Helper()
	if token != "" {
		headers = append(headers, "Authorization", "Bearer "+token)
	}
	headers = append(headers, "Content-Type", "application/json")
	a := r.Call(r.Unauthenticated(), http.MethodPost, "/apis/authentication.k8s.io/v1/selfsubjectreviews",
		`{"apiVersion":"authentication.k8s.io/v1","kind":"SelfSubjectReview"}`, headers...)
	var review authenticationv1.SelfSubjectReview
	if a.Code == http.StatusCreated {
		if err := json.Unmarshal([]byte(a.Body), &review); err != nil {
			r.TB.Fatal(err)
		}
	}
	return review.Status.UserInfo, a.Code
}
