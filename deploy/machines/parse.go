package machines

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Bounds of a cluster file.
const (
	maxFile  = 1 << 20 // bytes
	maxHosts = 1000
	maxText  = 4096 // bytes of one value
)

var (
	hostName = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)
	sshName  = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9._-]{0,63}$`)
	flagName = regexp.MustCompile(`^[a-z][a-z0-9-]{0,63}$`)
	// initValue has what install.sh takes of a flag of init.
	initValue = regexp.MustCompile(`^[]A-Za-z0-9._:/=,@+[-]{1,512}$`)
	labelKey  = regexp.MustCompile(`^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$`)
	labelText = regexp.MustCompile(`^([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?$`)
	taintForm = regexp.MustCompile(`^([^=:]+)(?:=([^=:]*))?:(NoSchedule|PreferNoSchedule|NoExecute)$`)
)

// elsewhere are settings that follow from other keys of the cluster file, each with the key.
var elsewhere = map[string]string{
	"standby": "the host's roles", "name": "the host's name", "node-name": "the host's name", "advertise-address": "the host's address", "node-ip": "the host's address",
	"server": "the hosts with a replica", "token": "tokens that are made when a machine joins", "token-file": "tokens that are made when a machine joins",
	"node-labels": "the host's labels", "taints": "the host's taints", "cluster-name": "the key name",
	"data-dir": "the scripts of a release, which know its place", "state-dir": "the scripts of a release, which know its place",
	"run-dir": "the scripts of a release, which know its place", "cgroup-root": "the units of a release, which know its place", "config": "the units of a release",
}

// Parse judges a cluster file; paths in it are relative to folder, and ~ is home. Errors begin with what comes after the file's name.
func Parse(raw []byte, folder, home string) (Cluster, error) {
	if len(raw) > maxFile {
		return Cluster{}, fmt.Errorf(": %d bytes: a cluster file has at most %d", len(raw), maxFile)
	}
	// A short text of nested brackets would keep the parser busy.
	if n := bytes.Count(raw, []byte("[")) + bytes.Count(raw, []byte("{")); n > 10*maxHosts {
		return Cluster{}, fmt.Errorf(": %d brackets: no cluster file has so many", n)
	}
	dec := yaml.NewDecoder(bytes.NewReader(raw))
	var doc, more yaml.Node
	switch err := dec.Decode(&doc); {
	case errors.Is(err, io.EOF):
		return Cluster{}, errors.New(" is empty: want apiVersion, kind and hosts")
	case err != nil:
		return Cluster{}, fmt.Errorf(": %s", strings.TrimPrefix(err.Error(), "yaml: "))
	}
	if err := dec.Decode(&more); !errors.Is(err, io.EOF) {
		return Cluster{}, errors.New(": there is more than one document: want one")
	}
	p := parser{lines: map[string]int{}}
	if err := p.file(doc.Content[0]); err != nil {
		return Cluster{}, err
	}
	for i := range p.hosts {
		p.cluster.Hosts = append(p.cluster.Hosts, p.host(p.hosts[i]))
	}
	if err := p.cluster.complete(folder, home, p.lines); err != nil {
		return Cluster{}, err
	}
	return p.cluster, nil
}

// parser holds what stands before the hosts are made of it: a default may stand below them.
type parser struct {
	cluster             Cluster
	ssh                 SSH
	controlplane, agent Settings
	version, kind       string
	hosts               []Host
	lines               map[string]int // of each host
}

// host is one of the file with what all have in common.
func (p *parser) host(h Host) Host {
	h.ControlPlane, h.Agent = p.controlplane.over(h.ControlPlane), p.agent.over(h.Agent)
	s := p.ssh
	s.Address, s.HostKey = h.SSH.Address, h.SSH.HostKey
	for _, f := range []struct{ from, to *string }{{&h.SSH.User, &s.User}, {&h.SSH.Key, &s.Key}, {&h.SSH.KnownHosts, &s.KnownHosts}} {
		if *f.from != "" {
			*f.to = *f.from
		}
	}
	if h.SSH.Port != 0 {
		s.Port = h.SSH.Port
	}
	if s.User == "" {
		s.User = "root"
	}
	if s.Port == 0 {
		s.Port = 22
	}
	h.SSH = s
	return h
}

// key is what is done with the value of a key.
type key struct {
	name string
	take func(*yaml.Node) error
}

func (p *parser) file(top *yaml.Node) error {
	c := &p.cluster
	c.Name = "keelson"
	err := mapping("the file", top, []key{
		{"apiVersion", text(&p.version, nil, "")},
		{"kind", text(&p.kind, nil, "")},
		{"name", text(&c.Name, hostName, "small letters, digits and -, 63 at most")},
		{"release", text(&c.Release, nil, "")},
		{"init", p.init},
		{"ssh", func(n *yaml.Node) error { return sshKeys(&p.ssh, n, false) }},
		{"controlplane", settingsOf(&p.controlplane)},
		{"agent", settingsOf(&p.agent)},
		{"hosts", p.hostList},
	})
	switch {
	case err != nil:
		return err
	case p.version != APIVersion || p.kind != Kind:
		return fmt.Errorf(", line %d: apiVersion %q, kind %q: this kctl reads apiVersion: %s, kind: %s", top.Line, p.version, p.kind, APIVersion, Kind)
	case len(p.hosts) == 0:
		return fmt.Errorf(", line %d: hosts is missing or empty: want the machines of the cluster", top.Line)
	}
	return nil
}

func (p *parser) init(n *yaml.Node) error {
	var s Settings
	if err := settingsOf(&s)(n); err != nil {
		return err
	}
	for i := 0; i < len(n.Content); i += 2 { // in the file's order
		name := n.Content[i].Value
		value := n.Content[i+1].Value
		if s[name].List || !initValue.MatchString(value) {
			return fmt.Errorf(", line %d: init.%s: want one value of letters, digits and ._:/=,@+-[]", n.Content[i].Line, name)
		}
		p.cluster.Init = append(p.cluster.Init, "--"+name+"="+value)
	}
	return nil
}

func (p *parser) hostList(n *yaml.Node) error {
	if n.Kind != yaml.SequenceNode {
		return fmt.Errorf(", line %d: hosts: want a list, each with name, address and roles", n.Line)
	}
	if len(n.Content) > maxHosts {
		return fmt.Errorf(", line %d: hosts: %d of them: a cluster file has at most %d", n.Line, len(n.Content), maxHosts)
	}
	for _, below := range n.Content {
		var h Host
		err := mapping("hosts", below, []key{
			{"name", text(&h.Name, hostName, "small letters, digits and -, 63 at most")},
			{"address", text(&h.Address, nil, "")},
			{"roles", roles(&h.Roles)},
			{"labels", labels(&h.Labels)},
			{"taints", taints(&h.Taints)},
			{"ssh", func(n *yaml.Node) error { return sshKeys(&h.SSH, n, true) }},
			{"controlplane", settingsOf(&h.ControlPlane)},
			{"agent", settingsOf(&h.Agent)},
		})
		if err != nil {
			return err
		}
		if h.Name == "" {
			return fmt.Errorf(", line %d: hosts: name is missing", below.Line)
		}
		if _, again := p.lines[h.Name]; !again {
			p.lines[h.Name] = below.Line
		}
		p.hosts = append(p.hosts, h)
	}
	return nil
}

func sshKeys(s *SSH, n *yaml.Node, ofHost bool) error {
	keys := []key{
		{"user", text(&s.User, sshName, "the name of a user")},
		{"port", port(&s.Port)},
		{"key", text(&s.Key, nil, "")},
		{"knownHosts", text(&s.KnownHosts, nil, "")},
	}
	if ofHost {
		keys = append(keys, key{"address", text(&s.Address, nil, "")}, key{"hostKey", text(&s.HostKey, nil, "")})
	}
	return mapping("ssh", n, keys)
}

// mapping hands the value of each key on. It refuses keys that it does not know, and such as are there twice.
func mapping(of string, n *yaml.Node, keys []key) error {
	if n.Kind != yaml.MappingNode {
		return fmt.Errorf(", line %d: %s: want lines of the form 'key: value'", n.Line, of)
	}
	seen := map[string]int{}
	for i := 0; i < len(n.Content); i += 2 {
		name, value := n.Content[i], n.Content[i+1]
		at := slices.IndexFunc(keys, func(k key) bool { return k.name == name.Value })
		if name.Kind != yaml.ScalarNode || at < 0 {
			var all []string
			for _, k := range keys {
				all = append(all, k.name)
			}
			return fmt.Errorf(", line %d: unknown key %s in %s: there are %s", name.Line, shown(name.Value), of, strings.Join(all, ", "))
		}
		if first, again := seen[name.Value]; again {
			return fmt.Errorf(", line %d: key %s is there twice: it stands in line %d already", name.Line, name.Value, first)
		}
		seen[name.Value] = name.Line
		if err := keys[at].take(value); err != nil {
			if !strings.HasPrefix(err.Error(), ", line ") {
				err = fmt.Errorf(", line %d: %s: %w", value.Line, name.Value, err)
			}
			return err
		}
	}
	return nil
}

// text takes a text that has a form, which is said in words.
func text(to *string, form *regexp.Regexp, want string) func(*yaml.Node) error {
	return func(n *yaml.Node) error {
		switch {
		case n.Kind != yaml.ScalarNode || n.Tag == "!!null" || n.Value == "":
			return errors.New("want a text")
		case len(n.Value) > maxText:
			return fmt.Errorf("%d bytes: want %d at most", len(n.Value), maxText)
		case form != nil && !form.MatchString(n.Value):
			return fmt.Errorf("%s: want %s", shown(n.Value), want)
		case strings.ContainsAny(n.Value, "\x00\n\r"):
			return fmt.Errorf("%s: want one line", shown(n.Value))
		}
		*to = n.Value
		return nil
	}
}

func port(to *int) func(*yaml.Node) error {
	return func(n *yaml.Node) error {
		v, err := strconv.ParseUint(n.Value, 10, 16)
		if n.Kind != yaml.ScalarNode || n.Tag != "!!int" || err != nil || v == 0 {
			return fmt.Errorf("%s: want a port, 1 to 65535", shown(n.Value))
		}
		*to = int(v)
		return nil
	}
}

func roles(to *[]Role) func(*yaml.Node) error {
	return func(n *yaml.Node) error {
		if n.Kind != yaml.SequenceNode {
			return errors.New("want a list of controlplane, standby and worker, such as [controlplane]")
		}
		for _, below := range n.Content {
			r := Role(below.Value)
			if r != ControlPlane && r != Standby && r != Worker || slices.Contains(*to, r) {
				return fmt.Errorf("%s: want controlplane, standby or worker, each once", shown(below.Value))
			}
			*to = append(*to, r)
		}
		return nil
	}
}

// machineLabels are kept right by the agent, whatever anybody else says.
var machineLabels = []string{"kubernetes.io/hostname", "kubernetes.io/os", "kubernetes.io/arch"}

func labels(to *map[string]string) func(*yaml.Node) error {
	return func(n *yaml.Node) error {
		if n.Kind != yaml.MappingNode {
			return errors.New("want lines of the form 'key: value'")
		}
		*to = map[string]string{}
		for i := 0; i < len(n.Content); i += 2 {
			k, v := n.Content[i], n.Content[i+1]
			if v.Kind != yaml.ScalarNode || v.Tag == "!!null" || !labelKey.MatchString(k.Value) || !labelText.MatchString(v.Value) {
				return fmt.Errorf("%s: %s is no label of a node (a number or a truth value goes in quotes)", shown(k.Value), shown(v.Value))
			}
			if _, again := (*to)[k.Value]; again {
				return fmt.Errorf("%s is there twice", shown(k.Value))
			}
			if slices.Contains(machineLabels, k.Value) {
				return fmt.Errorf("%s is what the machine says of itself", k.Value)
			}
			(*to)[k.Value] = v.Value
		}
		return nil
	}
}

func taints(to *[]string) func(*yaml.Node) error {
	return func(n *yaml.Node) error {
		if n.Kind != yaml.SequenceNode {
			return errors.New("want a list of KEY[=VALUE]:EFFECT")
		}
		seen := map[string]bool{} // by key and effect
		for _, below := range n.Content {
			m := taintForm.FindStringSubmatch(below.Value)
			if m == nil || !labelKey.MatchString(m[1]) || !labelText.MatchString(m[2]) || seen[m[1]+m[3]] {
				return fmt.Errorf("%s: want KEY[=VALUE]:EFFECT, each key once with an effect; effects are NoSchedule, PreferNoSchedule and NoExecute", shown(below.Value))
			}
			seen[m[1]+m[3]] = true
			*to = append(*to, below.Value)
		}
		return nil
	}
}

// settingsOf takes keys of a daemon's file. Whether the daemon knows them it says itself, before they are put on a machine.
func settingsOf(to *Settings) func(*yaml.Node) error {
	return func(n *yaml.Node) error {
		if n.Kind != yaml.MappingNode {
			return errors.New("want lines of the form 'key: value', as the daemon's own file has them")
		}
		*to = Settings{}
		for i := 0; i < len(n.Content); i += 2 {
			k, v := n.Content[i], n.Content[i+1]
			if !flagName.MatchString(k.Value) {
				return fmt.Errorf(", line %d: %s is no key of a daemon's settings", k.Line, shown(k.Value))
			}
			if from, ok := elsewhere[k.Value]; ok {
				return fmt.Errorf(", line %d: %s does not stand here: it comes from %s", k.Line, k.Value, from)
			}
			if _, again := (*to)[k.Value]; again {
				return fmt.Errorf(", line %d: key %s is there twice", k.Line, k.Value)
			}
			value, err := valueOf(v)
			if err != nil {
				return fmt.Errorf(", line %d: %s: %w", v.Line, k.Value, err)
			}
			(*to)[k.Value] = value
		}
		return nil
	}
}

func valueOf(n *yaml.Node) (Value, error) {
	switch n.Kind {
	case yaml.ScalarNode:
		one, err := scalar(n)
		return Value{Text: []string{one}}, err
	case yaml.SequenceNode:
		v := Value{List: true}
		for _, below := range n.Content {
			one, err := scalar(below)
			if err != nil {
				return Value{}, err
			}
			v.Text = append(v.Text, one)
		}
		return v, nil
	}
	return Value{}, errors.New("want a value or a list of values")
}

// scalar is a value as YAML writes it: what was text stays text, whatever it looks like.
func scalar(n *yaml.Node) (string, error) {
	var s string
	if n.Kind != yaml.ScalarNode || n.Tag == "!!null" {
		return "", errors.New("want a value (to have the default, leave the key out)")
	}
	if err := text(&s, nil, "")(n); err != nil && n.Value != "" {
		return "", err
	}
	switch n.Tag {
	case "!!int", "!!bool", "!!float":
		return n.Value, nil
	}
	return strconv.Quote(n.Value), nil
}

// shown is a text of bounded length in quotes.
func shown(s string) string {
	if len(s) > 64 {
		return fmt.Sprintf("%.64q...", s)
	}
	return fmt.Sprintf("%q", s)
}

func isURL(s string) bool { return strings.HasPrefix(s, "https://") || strings.HasPrefix(s, "http://") }
