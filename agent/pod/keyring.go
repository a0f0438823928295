package pod

import (
	"encoding/base64"
	"encoding/json"
	"strings"

	v1 "k8s.io/api/core/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
)

// pullCredentials returns the credentials in the pod's imagePullSecrets that match the image's
// registry. The most specific match comes first. Missing or malformed Secrets are skipped, as in
// Kubernetes.
func pullCredentials(objects agent.Objects, pod *v1.Pod, image string) []*cri.AuthConfig {
	type login struct {
		Username      string `json:"username"`
		Password      string `json:"password"`
		Auth          string `json:"auth"`
		IdentityToken string `json:"identitytoken"`
	}
	var out []*cri.AuthConfig
	best := 0
	for _, ref := range pod.Spec.ImagePullSecrets {
		s, ok := objects.Secret(pod.Namespace, ref.Name)
		if !ok {
			continue
		}
		logins := map[string]login{}
		if b, ok := s.Data[v1.DockerConfigJsonKey]; ok {
			var file struct {
				Auths map[string]login `json:"auths"`
			}
			if json.Unmarshal(b, &file) != nil {
				continue
			}
			logins = file.Auths
		} else if b, ok := s.Data[v1.DockerConfigKey]; !ok || json.Unmarshal(b, &logins) != nil {
			continue
		}
		for host, l := range logins {
			n := matchRegistry(host, image)
			if n == 0 {
				continue
			}
			if l.Username == "" && l.Auth != "" {
				if b, err := base64.StdEncoding.DecodeString(l.Auth); err == nil {
					l.Username, l.Password, _ = strings.Cut(string(b), ":")
				}
			}
			c := &cri.AuthConfig{Username: l.Username, Password: l.Password, IdentityToken: l.IdentityToken,
				ServerAddress: host}
			if n > best {
				best, out = n, append([]*cri.AuthConfig{c}, out...)
			} else {
				out = append(out, c)
			}
		}
	}
	return out
}

// matchRegistry returns how specifically a registry entry ("https://host:port/path", "*.host")
// matches an image: 0 if it does not match, otherwise 1 plus the length of the matched path.
func matchRegistry(entry, image string) int {
	entry = strings.TrimPrefix(strings.TrimPrefix(entry, "https://"), "http://")
	entry = strings.TrimSuffix(strings.TrimSuffix(strings.TrimSuffix(entry, "/"), "/v2"), "/v1")
	host, rest, ok := strings.Cut(image, "/")
	if !ok || !strings.ContainsAny(host, ".:") && host != "localhost" {
		host, rest = "docker.io", image
	}
	wantHost, wantPath, _ := strings.Cut(entry, "/")
	if wantHost == "index.docker.io" || wantHost == "registry-1.docker.io" {
		wantHost = "docker.io"
	}
	if suffix, glob := strings.CutPrefix(wantHost, "*."); glob {
		label, tail, ok := strings.Cut(host, ".")
		if !ok || label == "" || tail != suffix {
			return 0
		}
	} else if wantHost != host {
		return 0
	}
	if wantPath != "" && rest != wantPath && !strings.HasPrefix(rest, wantPath+"/") &&
		!strings.HasPrefix(rest, wantPath+":") {
		return 0
	}
	return 1 + len(wantPath)
}
