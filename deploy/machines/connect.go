package machines

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/agent"
	"golang.org/x/crypto/ssh/knownhosts"
)

// Time limits of an SSH connection to a machine.
const (
	connectTimeout    = 20 * time.Second // to open the TCP connection
	dialTimeout       = time.Minute      // to authenticate as well; takes time on a busy machine
	keepaliveInterval = 15 * time.Second // time between keepalive requests
	keepaliveTimeout  = time.Minute      // to receive the response of a keepalive request
)

// Machine is an SSH connection to a machine of the cluster file. It is safe for concurrent use.
type Machine struct {
	Host   Host
	client *ssh.Client
	done   chan struct{}
	close  sync.Once
}

// Dial connects to a machine by SSH. It returns an error if the host key is not the expected one,
// or if the machine accepts no key. It also fails if no TCP connection is open after 20 seconds, or
// if authentication takes longer than a minute. An error that the user can repair contains the
// remedy.
func Dial(ctx context.Context, h Host) (*Machine, error) {
	m, err := dialSSH(ctx, h)
	if err != nil {
		return nil, fmt.Errorf("reaching %s as %s@%s: %w", h.Name, h.SSH.User, sshTarget(h), err)
	}
	return m, nil
}

func sshTarget(h Host) string { return net.JoinHostPort(h.SSH.Address, strconv.Itoa(h.SSH.Port)) }

func dialSSH(ctx context.Context, h Host) (*Machine, error) {
	check, algorithms, err := hostKeyCheck(h)
	if err != nil {
		return nil, err
	}
	auth, closeAgent, err := authMethods(h)
	if err != nil {
		return nil, err
	}
	defer closeAgent()
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	d := net.Dialer{Timeout: connectTimeout}
	conn, err := d.DialContext(ctx, "tcp", sshTarget(h))
	if err != nil {
		return nil, err
	}
	// ssh.NewClientConn takes no context. If ctx ends, the TCP connection is closed, which ends it.
	over := context.AfterFunc(ctx, func() { conn.Close() })
	c, channels, requests, err := ssh.NewClientConn(conn, sshTarget(h), &ssh.ClientConfig{
		User: h.SSH.User, Auth: auth, HostKeyCallback: check, HostKeyAlgorithms: algorithms,
		ClientVersion: "SSH-2.0-keelson",
	})
	if !over() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		conn.Close()
		if ctx.Err() != nil {
			return nil, fmt.Errorf("no SSH handshake within %v: %w", dialTimeout, ctx.Err())
		}
		if strings.Contains(err.Error(), "unable to authenticate") {
			return nil,
				fmt.Errorf("it accepts none of your keys: put a public key of yours into ~/.ssh/authorized_keys of %s "+
					"there, or name the private one with ssh.key: %w", h.SSH.User, err)
		}
		return nil, err
	}
	m := &Machine{Host: h, client: ssh.NewClient(c, channels, requests), done: make(chan struct{})}
	go m.runKeepalive()
	return m, nil
}

// Close closes the SSH connection. Commands that run on it are interrupted.
func (m *Machine) Close() error {
	m.close.Do(func() { close(m.done) })
	return m.client.Close()
}

// runKeepalive sends keepalive requests until Close. It closes the connection if a request is not
// answered within keepaliveTimeout, so that no command waits forever.
func (m *Machine) runKeepalive() {
	tick := time.NewTicker(keepaliveInterval)
	defer tick.Stop()
	for {
		select {
		case <-m.done:
			return
		case <-tick.C:
		}
		answered := make(chan error, 1)
		go func() {
			_, _, err := m.client.SendRequest("keepalive@openssh.com", true, nil)
			answered <- err
		}()
		select {
		case err := <-answered:
			if err != nil {
				return
			}
		case <-m.done:
			return
		case <-time.After(keepaliveTimeout):
			m.client.Close()
			return
		}
	}
}

// hostKeyCheck returns a callback that verifies the host key of the machine: against ssh.hostKey if
// set, otherwise against the known_hosts file. It also returns the signature algorithms of the
// expected keys. The client must request these algorithms, because a server with several keys would
// otherwise offer another key.
func hostKeyCheck(h Host) (ssh.HostKeyCallback, []string, error) {
	if h.SSH.HostKey != "" {
		want, _, _, _, err := ssh.ParseAuthorizedKey([]byte(h.SSH.HostKey))
		if err != nil {
			return nil, nil, fmt.Errorf("ssh.hostKey: want a line as in /etc/ssh/ssh_host_ed25519_key.pub: %w", err)
		}
		return func(_ string, _ net.Addr, is ssh.PublicKey) error {
			if string(is.Marshal()) != string(want.Marshal()) {
				return fmt.Errorf("it proves to have the key %s, and ssh.hostKey is %s: this is another machine, or "+
					"it was reinstalled",
					ssh.FingerprintSHA256(is), ssh.FingerprintSHA256(want))
			}
			return nil
		}, signatureAlgorithms(want.Type()), nil
	}
	known, err := knownhosts.New(h.SSH.KnownHosts)
	if errors.Is(err, fs.ErrNotExist) {
		known, err = func(string, net.Addr, ssh.PublicKey) error { return &knownhosts.KeyError{} }, nil
	}
	if err != nil {
		return nil, nil, fmt.Errorf("known hosts: %w", err)
	}
	check := func(name string, remote net.Addr, is ssh.PublicKey) error {
		err := known(name, remote, is)
		var differs *knownhosts.KeyError
		if !errors.As(err, &differs) {
			return err
		}
		if len(differs.Want) == 0 {
			return fmt.Errorf("it is not in %s: compare its fingerprint %s, then run 'ssh -p %d %s@%s' once, or give "+
				"its public key as ssh.hostKey",
				h.SSH.KnownHosts, ssh.FingerprintSHA256(is), h.SSH.Port, h.SSH.User, h.SSH.Address)
		}
		return fmt.Errorf("ITS KEY HAS CHANGED: it proves %s, and line %d of %s has %s: the connection may be "+
			"intercepted, or the machine was reinstalled; "+
			"if it was, 'ssh-keygen -R' forgets the old key", ssh.FingerprintSHA256(is), differs.Want[0].Line,
			differs.Want[0].Filename, ssh.FingerprintSHA256(differs.Want[0].Key))
	}
	// To list the known keys of the machine, an unknown key is checked: the error contains them.
	var differs *knownhosts.KeyError
	var sorts []string
	if errors.As(known(sshTarget(h), &net.TCPAddr{}, unknownKey{}), &differs) {
		for _, k := range differs.Want {
			for _, s := range signatureAlgorithms(k.Key.Type()) {
				if !slices.Contains(sorts, s) {
					sorts = append(sorts, s)
				}
			}
		}
	}
	return check, sorts, nil
}

// signatureAlgorithms returns the SSH signature algorithms to request for a host key of type
// keyType. For an RSA key, these are two algorithms. For any other key, it is the algorithm with
// the name keyType.
func signatureAlgorithms(keyType string) []string {
	if keyType == ssh.KeyAlgoRSA {
		return []string{ssh.KeyAlgoRSASHA512, ssh.KeyAlgoRSASHA256}
	}
	return []string{keyType}
}

// unknownKey is an ssh.PublicKey that equals no real key, so that known_hosts never accepts it. The
// error of that check lists the keys that known_hosts has for a machine.
type unknownKey struct{}

func (unknownKey) Type() string                        { return "none" }
func (unknownKey) Marshal() []byte                     { return []byte("none") }
func (unknownKey) Verify([]byte, *ssh.Signature) error { return errors.New("nobody signs with it") }

// authMethods returns the SSH authentication methods for a host: the private key file in SSH.Key if
// it is set, otherwise the keys of the SSH agent and of ~/.ssh. It also returns a function that
// closes the connection to the SSH agent.
func authMethods(h Host) ([]ssh.AuthMethod, func(), error) {
	if h.SSH.Key != "" {
		one, err := readPrivateKey(h.SSH.Key)
		if err != nil {
			return nil, nil, err
		}
		return []ssh.AuthMethod{ssh.PublicKeys(one)}, func() {}, nil
	}
	var auth []ssh.AuthMethod
	closeAgent := func() {}
	if socket := os.Getenv("SSH_AUTH_SOCK"); socket != "" {
		if conn, err := net.DialTimeout("unix", socket, 2*time.Second); err == nil {
			conn.SetDeadline(time.Now().Add(dialTimeout))
			closeAgent = func() { conn.Close() }
			auth = append(auth, ssh.PublicKeysCallback(agent.NewClient(conn).Signers))
		}
	}
	home, err := os.UserHomeDir()
	if err == nil {
		var own []ssh.Signer
		for _, name := range []string{"id_ed25519", "id_ecdsa", "id_rsa"} {
			if one, err := readPrivateKey(filepath.Join(home, ".ssh", name)); err == nil {
				// keys with a passphrase are left to the SSH agent
				own = append(own, one)
			}
		}
		if len(own) > 0 {
			auth = append(auth, ssh.PublicKeys(own...))
		}
	}
	if len(auth) == 0 {
		return nil, nil,
			errors.New("there is no SSH key: start an ssh agent, make one with ssh-keygen, or name one with ssh.key")
	}
	return auth, closeAgent, nil
}

func readPrivateKey(path string) (ssh.Signer, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("ssh.key: %w", err)
	}
	if !info.Mode().IsRegular() || info.Size() > 1<<16 {
		return nil, fmt.Errorf("ssh.key: %s is no file with a private key", path)
	}
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("ssh.key: %w", err)
	}
	one, err := ssh.ParsePrivateKey(raw)
	var locked *ssh.PassphraseMissingError
	if errors.As(err, &locked) {
		return nil,
			fmt.Errorf("ssh.key: %s has a passphrase: add it to an ssh agent with ssh-add, and leave ssh.key out", path)
	}
	if err != nil {
		return nil, fmt.Errorf("ssh.key: %s: %w", path, err)
	}
	return one, nil
}

// fingerprint returns the SHA-256 sum of raw in base64, to compare long contents.
func fingerprint(raw []byte) string {
	sum := sha256.Sum256(raw)
	return base64.RawStdEncoding.EncodeToString(sum[:])
}
