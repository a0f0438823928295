package machines

import (
	"crypto/x509"
	"encoding/pem"
	"strings"

	"go.yaml.in/yaml/v3"
)

// MayBeNamed says whether a file can name a machine so: daemons that were begun by hand may have names with dots, or with capitals.
func MayBeNamed(name string) bool { return hostName.MatchString(name) }

// ReplicaName is what a machine's replica calls itself: what its settings say, or else the machine's hostname. It is "" where nobody
// can tell, as without settings.
func (f Facts) ReplicaName() string {
	name, ok := setting(f.ControlPlane, "name")
	switch {
	case !ok:
		return ""
	case len(name) > 0:
		return name[0]
	}
	return f.Hostname
}

// AgentName is the name of a machine's node: that of its certificate, which never changes, or else what its settings say, or else the
// machine's hostname. It is "" where nobody can tell.
func (f Facts) AgentName() string {
	name, ok := setting(f.Agent, "node-name")
	switch {
	case f.NodeName != "":
		return f.NodeName
	case !ok:
		return ""
	case len(name) > 0:
		return name[0]
	}
	return strings.ToLower(f.Hostname)
}

// AgentServers are the replicas that a machine's agent was told of, each HOST:PORT.
func (f Facts) AgentServers() (out []string) {
	all, _ := setting(f.Agent, "server")
	for _, one := range all {
		for part := range strings.SplitSeq(one, ",") {
			if part = strings.TrimSpace(part); part != "" {
				out = append(out, part)
			}
		}
	}
	return out
}

// setting is what a daemon's file of settings says for a key: one text, or a list, or nothing. It is not ok where there is no file
// that can be read.
func setting(file, key string) (value []string, ok bool) {
	if strings.TrimSpace(file) == "" {
		return nil, false
	}
	var all map[string]yaml.Node
	if err := yaml.Unmarshal([]byte(file), &all); err != nil {
		return nil, false
	}
	of := all[key]
	if of.Kind == yaml.ScalarNode && of.Value != "" {
		return []string{of.Value}, true
	}
	for _, one := range of.Content {
		if of.Kind == yaml.SequenceNode && one.Kind == yaml.ScalarNode && one.Value != "" {
			value = append(value, one.Value)
		}
	}
	return value, true
}

// nodeName is of which node a certificate is; "" where it is none of a node's.
func nodeName(certificate string) string {
	block, _ := pem.Decode([]byte(certificate))
	if block == nil {
		return ""
	}
	c, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return ""
	}
	name, ok := strings.CutPrefix(c.Subject.CommonName, "system:node:")
	if !ok {
		return ""
	}
	return name
}
