package image

import (
	"context"
	"runtime"
	"slices"
	"sync"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// registryClient gets manifests from registries and their mirrors.
type registryClient struct {
	mirrors   map[string][]string // Config.Mirrors
	insecure  []string            // Config.Insecure
	transport func() (*registryTransport, error)
}

func newRegistryClient(cfg Config) registryClient {
	return registryClient{mirrors: cfg.Mirrors, insecure: cfg.Insecure,
		transport: sync.OnceValues(func() (*registryTransport, error) { return newTransport(cfg) })}
}

// mirrorsOf returns the mirror hosts that are tried before a registry, in order.
func (r registryClient) mirrorsOf(registry string) []string {
	mirrors, named := r.mirrors[registry]
	if !named {
		mirrors = r.mirrors["*"]
	}
	return slices.DeleteFunc(slices.Clone(mirrors), func(host string) bool { return host == registry })
}

// fetchManifest gets the manifest of the image ref for this node's platform from host, which is the
// registry of ref or a mirror.
func (r registryClient) fetchManifest(ctx context.Context, host string, ref reference, auth *cri.AuthConfig) (
	*remote.Descriptor, error,
) {
	named, err := r.remoteReference(host, ref)
	if err != nil {
		return nil, err
	}
	t, err := r.transport()
	if err != nil {
		return nil, err
	}
	options := []remote.Option{remote.WithContext(ctx), remote.WithTransport(t), remote.WithPlatform(nodePlatform()),
		remote.WithAuth(newAuthenticator(auth)), remote.WithUserAgent("keelson")}
	return remote.Get(named, options...)
}

// remoteReference converts ref, on the given host, to the type of the registry library.
func (r registryClient) remoteReference(host string, ref reference) (name.Reference, error) {
	if host == dockerHub {
		host = libraryDockerHub
	}
	var options []name.Option
	if slices.Contains(r.insecure, host) {
		options = append(options, name.Insecure)
	}
	full := host + "/" + ref.repo + ":" + ref.tag
	if ref.digest != "" {
		full = host + "/" + ref.repo + "@" + ref.digest
	}
	return name.ParseReference(full, options...)
}

// nodePlatform returns the operating system and architecture of this node, as a type of the
// registry library.
func nodePlatform() v1.Platform {
	p := v1.Platform{OS: "linux", Architecture: runtime.GOARCH}
	if p.Architecture == "arm64" {
		p.Variant = "v8"
	}
	return p
}

// newAuthenticator converts the credentials of a pull request to the type of the registry library.
// Without credentials, it returns anonymous access.
func newAuthenticator(a *cri.AuthConfig) authn.Authenticator {
	if a == nil {
		return authn.Anonymous
	}
	return authn.FromConfig(authn.AuthConfig{Username: a.GetUsername(), Password: a.GetPassword(), Auth: a.GetAuth(),
		IdentityToken: a.GetIdentityToken(), RegistryToken: a.GetRegistryToken()})
}
